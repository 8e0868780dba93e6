"""The accounting journal of a billing entity, and its export for bookkeeping programs."""
