"""The best fixed way to ask, from a table: question x arm (a plan's wording and form) x sample -> reply, grade, price.

table    fills it by asking, or from a log of replies; what P(right) is learned from
race     which cells to ask for, within a number of calls: plans race on ever more questions
arms     reads it: who is asked next, and when to stop, by P(right) or by predicted gains
choose   reads it: rates, cross-fitting, the result and its verdict
"""

__all__ = ["arms", "choose", "race", "table"]
