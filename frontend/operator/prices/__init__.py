"""The price books, for operators."""
