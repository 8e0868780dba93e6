"""Request lifecycle: the service that runs requests, the batch runner and the request log.

`InferenceService` (service.py) takes an authenticated request through tokenization, routing, admission, dispatch and
streaming to its release. HTTP and WebSocket endpoints use it directly. `BatchRunner` (batch_runner.py) sends the lines
of batches through it. `RequestLogWriter` (request_log.py) stores a record of each request. `Stage` (stage.py) is the
interface of the optional parts of the path, which are in millrace.gateway.stages.
"""
