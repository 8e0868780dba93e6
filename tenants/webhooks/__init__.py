"""Telling tenants' own servers what happened: signed, at least once, never to an address inside."""
