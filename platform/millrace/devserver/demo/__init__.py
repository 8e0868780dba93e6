"""Demo tenants with months of usage, made by the platform's own verbs and settler (`manage.py seed_demo`)."""
