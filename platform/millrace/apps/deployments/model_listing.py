"""The models that the API of an upstream lists, which checks its base URL and API key before a deployment is added."""

from __future__ import annotations

from http.client import HTTPException
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from inference_worker.contract.texts import Text
from inference_worker.contract.upstreams import UpstreamEngine
from millrace.apps.deployments.models import Deployment
from millrace.apps.deployments.value_checks import check_base_url, check_credential, check_preset, make_base_url_error
from tenants.actions.common import FieldRefused
from tenants.actions.credentials import check_secret
from tenants.credentials.encryption import NoEncryptionKey, decrypt_secret
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, release_connection
from tenants.models import UpstreamCredential
from tenants.webhooks.posting import describe_failure, exchange
from tenants.webhooks.targets import TargetRefused

CHECK_SECONDS = 10.0
MAX_RESPONSE_BYTES = 2 << 20
MAX_MODELS = 1000
MAX_NAME_LENGTH = 256
MAX_REASON_LENGTH = 300
_ANTHROPIC_PAGE = "?limit=1000"
_REJECTED, _NO_LIST = (401, 403), (404, 405, 501)


class ListedModels(NamedTuple):
    """The names of an upstream's models; none if the upstream has no list."""

    names: tuple[str, ...]


class _Model(msgspec.Struct):
    id: str


class _List(msgspec.Struct):
    data: list[_Model]


class _ErrorDetails(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    error: _ErrorDetails


def list_upstream_models(row: Deployment, secret: str | None) -> ListedModels:
    """Return the models that the upstream of a deployment lists for the new secret or the deployment's credential.

    Call it outside of transactions: it waits for the upstream. The deployment needs no name and no model yet.

    Raises:
        FieldRefused: the upstream cannot be reached, or rejects the API key.
    """
    preset = check_preset(row)
    check_base_url(row, preset)
    if secret is not None:
        check_secret(secret)
    else:
        secret = _read_secret(row)
    headers = {"accept": "application/json", **preset.headers}
    if secret:
        headers[preset.auth_header] = preset.auth_prefix + secret
    url = f"{row.source}/models{_ANTHROPIC_PAGE if row.engine == UpstreamEngine.ANTHROPIC else ''}"
    hosts = (urlsplit(row.source).hostname or "",) if row.allow_internal else ()
    release_connection()
    try:
        status, body = exchange(
            "GET", url, headers, None, private_hosts=hosts, seconds=CHECK_SECONDS, max_bytes=MAX_RESPONSE_BYTES
        )
    except TargetRefused as exc:
        raise make_base_url_error(exc) from exc
    except (OSError, HTTPException, ValueError) as exc:
        message = Text("The upstream cannot be reached. %(reason)s", reason=describe_failure(exc))
        raise FieldRefused("base_url", "unreachable", message) from exc
    if status in _REJECTED:
        field = "credential_id" if row.credential_id is not None else "secret"
        raise FieldRefused(field, "rejected", _describe_rejection(status, body, secret))
    if status in _NO_LIST:
        return ListedModels(())
    if status != 200:
        message = Text("The upstream responded with the status %(status)s. Check the base URL.", status=str(status))
        raise FieldRefused("base_url", "unexpected", message)
    return ListedModels(_read_names(body))


def _read_secret(row: Deployment) -> str:
    """Return the secret of the deployment's credential; empty without one.

    Raises:
        FieldRefused: the credential does not exist, or cannot be decrypted.
    """
    if row.credential_id is None:
        return ""
    with all_tenants_scope(BypassReason.OPERATOR):
        check_credential(row)
        credential = UpstreamCredential.objects.all_tenants().get(pk=row.credential_id)
    try:
        return decrypt_secret(credential)
    except NoEncryptionKey as exc:
        message = Text("The credential cannot be decrypted. Rotate it, or enter an API key.")
        raise FieldRefused("credential_id", "invalid", message) from exc


def _describe_rejection(status: int, body: bytes, secret: str) -> str:
    """Return the reason of an upstream that rejects the API key, without the key."""
    if not secret:
        return Text("The upstream needs an API key (status %(status)s).", status=str(status))
    try:
        reason = msgspec.json.decode(body, type=_Error).error.message.replace(secret, "…")[:MAX_REASON_LENGTH]
    except msgspec.DecodeError:
        reason = ""
    if not reason:
        return Text("The upstream rejects the API key (status %(status)s).", status=str(status))
    return Text(
        "The upstream rejects the API key (status %(status)s): %(reason)s", status=str(status), reason=repr(reason)
    )


def _read_names(body: bytes) -> tuple[str, ...]:
    """Return the names in the response, sorted.

    Raises:
        FieldRefused: the response is no list of models.
    """
    try:
        found = {model.id for model in msgspec.json.decode(body, type=_List).data}
    except msgspec.DecodeError as exc:
        message = Text(
            "The response is no list of models. The base URL ends with the version, such as https://host/v1."
        )
        raise FieldRefused("base_url", "unexpected", message) from exc
    names = sorted(name for name in found if 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable())
    return tuple(names[:MAX_MODELS])
