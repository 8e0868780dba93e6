"""Sequences, the step that is scheduled for them, and the interface of runners that execute it."""
