"""Demo tenants with months of usage, created by the platform's actions and settler (`millrace manage seed_demo`)."""
