"""The default on a fresh machine: a question-answering assistant and a rewriter behind an Ollama-compatible server."""
