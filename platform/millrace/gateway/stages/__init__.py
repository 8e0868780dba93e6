"""The stages of requests: parts of the gateway that only some requests use, each with its own state.

Each module has a stage and its hooks (millrace.gateway.lifecycle.stage). `assembly.py` builds all of them; the key's
snapshot and the settings decide which a request passes through.

| stage | a request passes through it if | if it fails |
|---|---|---|
| `experiments` | an experiment runs on its model | the request fails, since it would count for no arm |
| `escalation` | a rule of its policy checks complete answers | the answer is returned unchecked |
| `answer_cache` | the tenant stores answers, or the request may not be computed | the answer is computed |
| `semantic_checks` | its policy serves answers to similar questions | the hit is not checked |
| `summaries` | its policy shortens long conversations | the messages are dropped without a summary |
| `shadows` | its policy selects it for a shadow | it has no shadow |
"""
