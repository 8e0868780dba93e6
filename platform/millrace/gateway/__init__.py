"""The gateway: the /v1 API, from HTTP to a worker and back.

One ASGI process runs one `Gateway` (app.py), which holds everything that its requests share. A request passes these
packages:

1. `connections` accepts the connection and limits slow and unauthenticated clients.
2. `routes` selects the endpoint in `http`, which authenticates the API key with `auth` and receives the body.
3. `protocols` decodes the body from its API dialect into an `InferenceRequest` (core/types.py). Large bodies are
   decoded and tokenized in `prompt_processes`.
4. `lifecycle.service` tokenizes the prompt and runs the request. `routing` returns the candidate deployments.
   `admission` checks rate limits and reserves the maximum cost from the budgets. `stages` has the parts of the path
   that only some requests use, such as the answer cache.
5. `dispatch` queues the execution, selects a replica, writes the job to Valkey and sends a wakeup. A worker claims the
   job and writes its events to Valkey.
6. `dispatch.streams` receives the events. A writer of `protocols` turns them into the dialect, and the endpoint sends
   them to the client.
7. When the request ends, `lifecycle.service` closes the admission lease and `lifecycle.request_log` stores a record.
   The settler (billing.metering) bills the usage that the worker reported.
"""
