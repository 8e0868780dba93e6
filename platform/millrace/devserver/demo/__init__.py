"""Demo tenants with months of usage, created by the platform's actions and settler (`manage.py seed_demo`)."""
