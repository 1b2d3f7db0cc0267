"""The telnet protocol (RFC 854, options as in RFC 1143) without a socket: bytes in, text and answers out."""

from __future__ import annotations

from query_mutator.batching.streaming.gym_types import GymProtocolError

__all__ = ["TelnetCodec"]

IAC, DONT, DO, WONT, WILL, SB, SE = 255, 254, 253, 252, 251, 250, 240
ECHO, SUPPRESS_GO_AHEAD = 1, 3
CR, NUL = 13, 0
MAX_SUBNEGOTIATION_BYTES = 4096

# Options that each side may use; all others are refused. Only changes are answered: two sides that agree fall silent.
WANTED_FROM_OTHER = frozenset({ECHO, SUPPRESS_GO_AHEAD})
OFFERED_BY_US = frozenset({SUPPRESS_GO_AHEAD})


class TelnetCodec:
    """Remove commands from a stream of bytes, wherever it is cut, and answer them."""

    def __init__(self) -> None:
        self.options_there: set[int] = set()  # in use by the other side
        self.options_here: set[int] = set()
        self._asked: set[int] = set()  # DO sent, not yet answered
        self._refused: set[tuple[int, int]] = set()
        self._command: bytearray | None = None  # an incomplete command
        self._after_return = False

    def ask(self, option: int) -> bytes:
        """Return the request that the other side use an option."""
        self._asked.add(option)
        return bytes([IAC, DO, option])

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the text in `data` (CR NUL as CR) and the answer to the commands in it."""
        text, answer = bytearray(), bytearray()
        for byte in data:
            if self._command is not None:
                self._command.append(byte)
                self._in_command(text, answer)
            elif byte == IAC:
                self._command = bytearray()
            elif not (byte == NUL and self._after_return):
                text.append(byte)
            self._after_return = byte == CR and self._command is None
        return bytes(text), bytes(answer)

    def _in_command(self, text: bytearray, answer: bytearray) -> None:
        """Process the command received so far, if it is complete."""
        command = self._command
        assert command
        if command[0] == SB:
            if len(command) > MAX_SUBNEGOTIATION_BYTES:
                raise GymProtocolError("a telnet subnegotiation does not end; is this a telnet server?")
            # IAC IAC inside is one data byte: only SE after an odd run of IAC ends it
            before = command[1:-1]
            if command[-1] != SE or (len(before) - len(before.rstrip(b"\xff"))) % 2 == 0:
                return
        elif command[0] in (WILL, WONT, DO, DONT):
            if len(command) < 2:
                return
            answer += self._negotiate(command[0], command[1])
        elif command[0] == IAC:
            text.append(IAC)
        self._command = None  # all others (NOP, GA, ..) have one byte and need no answer

    def _negotiate(self, verb: int, option: int) -> bytes:
        theirs = verb in (WILL, WONT)
        active, wanted = (self.options_there, WANTED_FROM_OTHER) if theirs else (self.options_here, OFFERED_BY_US)
        agree, refuse = (DO, DONT) if theirs else (WILL, WONT)
        asked = theirs and option in self._asked
        if asked:
            self._asked.discard(option)
        if verb in (WONT, DONT):
            was_active = option in active
            active.discard(option)
            return bytes([IAC, refuse, option]) if was_active else b""
        if option in active or (verb, option) in self._refused:
            return b""
        if option in wanted:
            active.add(option)
            return b"" if asked else bytes([IAC, agree, option])
        self._refused.add((verb, option))
        return bytes([IAC, refuse, option])
