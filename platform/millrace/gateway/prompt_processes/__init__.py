"""The processes that decode and tokenize large request bodies, and their queue."""
