"""Usage of a tenant: by group and over time, with cache savings and rejections."""
