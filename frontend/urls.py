"""URL patterns of the console."""

from __future__ import annotations

from allauth.account import views as account
from allauth.mfa.recovery_codes import views as recovery_codes
from allauth.mfa.webauthn import views as webauthn
from allauth.socialaccount import views as social
from django.contrib.auth.decorators import login_required
from django.urls import include, path, re_path

from frontend.accounts import openid_connect, passkeys, second_factor, views
from frontend.accounts.recent_sign_in import recent_sign_in_required
from frontend.accounts.recovery_codes import DownloadRecoveryCodes, ViewRecoveryCodes
from frontend.core import command_palette, preferences, shortcuts
from frontend.core.screens import screen_urls

urlpatterns = [
    path("", views.home, name="home"),
    path("login", views.LogIn.as_view(), name="account_login"),
    path("logout", views.LogOut.as_view(), name="account_logout"),
    path("invitations/<str:token>", views.invitation, name="invitation"),
    path("account/", views.account, name="account"),
    path("account/signed-in", views.signed_in, name="account_signed_in"),
    path("account/sessions/end", views.end_sessions, name="account_end_sessions"),
    path("account/alerts", views.alert_emails, name="account_alert_emails"),
    path("account/inactive", account.account_inactive, name="account_inactive"),
    path("account/signup", account.signup, name="account_signup"),  # shows that sign-up is closed
    path("account/confirm", views.Reauthenticate.as_view(), name="account_reauthenticate"),
    path("account/password", recent_sign_in_required(account.password_change), name="account_change_password"),
    path("account/password/set", recent_sign_in_required(account.password_set), name="account_set_password"),
    path("account/password/reset", account.password_reset, name="account_reset_password"),
    path("account/password/reset/sent", account.password_reset_done, name="account_reset_password_done"),
    re_path(
        r"^account/password/reset/(?P<uidb36>[0-9A-Za-z]+)-(?P<key>.+)$",
        account.password_reset_from_key,
        name="account_reset_password_from_key",
    ),
    path(
        "account/password/reset/done",
        account.password_reset_from_key_done,
        name="account_reset_password_from_key_done",
    ),
    path(
        "account/mfa/totp/activate/",
        login_required(second_factor.lock_user(second_factor.SecondFactorActivateTotp.as_view())),
        name="mfa_activate_totp",
    ),
    # allauth's views of these URLs fail for visitors.
    path(
        "account/mfa/recovery-codes/generate/",
        login_required(second_factor.lock_user(recovery_codes.generate_recovery_codes)),
        name="mfa_generate_recovery_codes",
    ),
    path(
        "account/mfa/webauthn/keys/<int:pk>/remove/",
        login_required(webauthn.remove_webauthn),
        name="mfa_remove_webauthn",
    ),
    path("account/mfa/webauthn/keys/<int:pk>/edit/", login_required(webauthn.edit_webauthn), name="mfa_edit_webauthn"),
    path("account/mfa/recovery-codes/", ViewRecoveryCodes.as_view(), name="mfa_view_recovery_codes"),
    path(
        "account/mfa/recovery-codes/download/",
        DownloadRecoveryCodes.as_view(),
        name="mfa_download_recovery_codes",
    ),
    path("account/mfa/authenticate/", passkeys.Authenticate.as_view(), name="mfa_authenticate"),
    path("account/mfa/webauthn/", passkeys.ListPasskeys.as_view(), name="mfa_list_webauthn"),
    path(
        "account/mfa/webauthn/add/",
        second_factor.lock_user(passkeys.AddPasskey.as_view()),
        name="mfa_add_webauthn",
    ),
    path("account/mfa/webauthn/login/", views.LogInWithPasskey.as_view(), name="mfa_login_webauthn"),
    path(
        "account/mfa/webauthn/reauthenticate/",
        passkeys.ReauthenticateWithPasskey.as_view(),
        name="mfa_reauthenticate_webauthn",
    ),
    path("account/mfa/", include("allauth.mfa.urls")),
    path("account/oidc/<str:provider_id>/login/", openid_connect.login, name="openid_connect_login"),
    path("account/oidc/<str:provider_id>/login/callback/", openid_connect.callback, name="openid_connect_callback"),
    path("account/social/cancelled", social.login_cancelled, name="socialaccount_login_cancelled"),
    path("account/social/error", social.login_error, name="socialaccount_login_error"),
    path("account/social/unknown", social.signup, name="socialaccount_signup"),
    path("account/social/", recent_sign_in_required(social.connections), name="socialaccount_connections"),
    path("preferences", preferences.preferences, name="preferences"),
    path("t/<slug:slug>/search", command_palette.tenant_search, name="search"),
    path("operator/search", command_palette.operator_search, name="operator-search"),
    path("t/<slug:slug>/shortcuts", shortcuts.tenant_shortcuts, name="shortcuts"),
    path("operator/shortcuts", shortcuts.operator_shortcuts, name="operator-shortcuts"),
    *screen_urls(),
]
