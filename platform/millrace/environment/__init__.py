"""The environment that the platform runs in: its settings, data directory, disks and processes.

The lowest package of the platform: it imports only the contract with the workers.
"""
