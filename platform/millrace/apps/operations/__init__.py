"""What operators need to run the platform: the replicas and their history, cordons, and what needs a person now.

See docs/operations.md.
"""
