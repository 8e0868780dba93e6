"""Prompt processes: child processes of the gateway that decode and tokenize large request bodies.

`PromptReader` (prompt_reader.py) reads small bodies on the event loop and sends others to the `PromptPool`
(prompt_pool.py), whose queue serves tenants in turn. A process (prompt_process.py) receives a body and returns the
request with its tokens (prompt_frames.py).
"""
