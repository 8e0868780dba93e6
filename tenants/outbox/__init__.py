"""The change feed and the email outbox."""
