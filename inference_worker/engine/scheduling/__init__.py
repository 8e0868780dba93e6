"""Scheduler, waiting queue, fairness between tenants, and preemption."""
