"""Messages, Redis keys, Lua scripts, request types and the tokenizer: the part that other packages import."""
