"""Usage events and what is made of them: who used how much, and what it costs."""
