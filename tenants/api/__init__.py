"""The management API of tenants: own tenant, projects, keys, members, limits, policies, audit log; and operators'."""
