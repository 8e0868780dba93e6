"""Dispatch: from an admitted request to a replica, and from the replica's events back to the request.

`Dispatcher.submit` puts an execution into its model's queue (queues.py). When a replica has capacity (placement.py,
replicas.py), the dispatcher writes the job to Valkey and sends a wakeup (wakeups.py). The worker that claims the job
writes events to the execution's log and to this gateway's stream. `StreamReader` (streams.py) passes each event to the
execution's buffer, from which the request reads it. `DispatchMonitor` (monitor.py) handles lost replicas and expired
executions. `StreamFollower` (stream_follower.py) reads the log of an execution that another gateway dispatched.
"""
