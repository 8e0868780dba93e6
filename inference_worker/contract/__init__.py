"""Messages, Redis keys, Lua scripts, request types and settings: the part that other packages import."""
