"""The pages that show recovery codes. The user is emailed about each view."""

from __future__ import annotations

from typing import Any

from allauth.mfa.recovery_codes.views import DownloadRecoveryCodesView, ViewRecoveryCodesView
from django.http import HttpRequest

from frontend.accounts.change_emails import report_change
from frontend.core.layout import signed_in_user


class _ReportedView:
    """A view of the recovery codes."""

    request: HttpRequest

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        shown: dict[str, Any] = super().get_context_data(**kwargs)  # type: ignore[misc]  # of the view this is mixed into
        report_change(self.request, signed_in_user(self.request), "recovery_codes_viewed")
        return shown


class ViewRecoveryCodes(_ReportedView, ViewRecoveryCodesView):
    """The page of the recovery codes."""


class DownloadRecoveryCodes(_ReportedView, DownloadRecoveryCodesView):
    """The file of the recovery codes."""
