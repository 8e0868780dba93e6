"""Sign-in, second factor and account pages."""
