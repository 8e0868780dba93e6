"""Django's settings, all derived from the typed ones in `millrace.environment.configuration`."""

from __future__ import annotations

from typing import Any

from millrace.environment.configuration import (
    database_parameters,
    parse_mail_server,
    platform_settings,
    read_credential_keys,
)
from tenants.isolation.db_roles import APP

_settings = platform_settings()
MILLRACE = _settings  # the typed settings, for the apps
READ_CREDENTIAL_KEYS = read_credential_keys  # a function: the keys change without a restart
_https = _settings.public_url.startswith("https://")

SECRET_KEY = _settings.secret_key
DEBUG = _settings.debug
ALLOWED_HOSTS = list(_settings.allowed_hosts)
ROOT_URLCONF = "millrace.conf.urls"
CELERY_APP = "millrace.conf.celery.app"  # by name: it imports the schedules of all apps
FIND_LANGUAGE = "frontend.core.languages.language_of"  # by name: no package imports the console
FIND_MODEL_OBSTACLES = "millrace.apps.deployments.model_obstacles.read_obstacles"  # by name: `tenants` imports no app
ASGI_APPLICATION = "millrace.conf.asgi.application"

INSTALLED_APPS = [
    "frontend",  # before apps whose templates it overrides
    "tenants.admin_config.RawAdminConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "allauth.socialaccount",
    # NOTE: not installed without a provider, because it imports requests, which takes 5 MB in each gateway.
    *(["allauth.socialaccount.providers.openid_connect"] if _settings.oidc_issuer else []),
    "allauth.usersessions",
    "channels",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "tenants",
    "billing",
    "millrace.apps.batches",
    "millrace.apps.feedback",
    "millrace.demo",
    "millrace.apps.request_log",
    "millrace.apps.answer_caches",
    "millrace.apps.policy_results",
    "millrace.apps.experiments",
    "millrace.apps.deployments",
    "millrace.apps.health",
    "millrace.apps.alerts",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.middleware.gzip.GZipMiddleware",
    "millrace.conf.middleware.SecurityHeaders",
    "millrace.conf.middleware.WholeStaticFiles",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "frontend.core.languages.ConsoleLanguage",
    "millrace.conf.middleware.StorableText",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "frontend.accounts.throttling.LoginThrottling",
    "allauth.account.middleware.AccountMiddleware",
    "millrace.conf.middleware.AuditActor",
    "frontend.accounts.second_factor.OperatorSecondFactor",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

CSRF_FAILURE_VIEW = "frontend.core.error_pages.csrf_failure"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "OPTIONS": {
            "builtins": ["django.templatetags.i18n", "template_partials.templatetags.partials"],
            "loaders": [
                (
                    "template_partials.loader.Loader",
                    [
                        (
                            "django.template.loaders.cached.Loader",
                            ["django.template.loaders.app_directories.Loader"],
                        )
                    ],
                )
            ],
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "frontend.core.context.theme",
            ],
        },
    },
]

# Data


def _database(url: str, *, role: str = "") -> dict[str, Any]:
    """Return a database's settings. With `role`, sessions start with that role (see tenants.isolation.db_roles)."""
    parameters = database_parameters(url)
    query_options = parameters["OPTIONS"]
    options = {"application_name": "millrace", "connect_timeout": 5, **query_options}
    if role:
        options["options"] = f"{query_options.get('options', '')} -c role={role}".strip()
    return {"ENGINE": "django.db.backends.postgresql", **parameters, "OPTIONS": options}


DATABASES = {"default": _database(_settings.database_url, role=APP)}
DATABASES["default"]["OPTIONS"]["pool"] = {"min_size": 1, "max_size": 8, "timeout": 10}
# After a restart of PostgreSQL, connections are replaced instead of failing a request.
DATABASES["default"]["CONN_HEALTH_CHECKS"] = True
# The owner of the tables, only for `millrace manage migrate`.
DATABASES["owner"] = _database(_settings.migration_database_url or _settings.database_url)
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": _settings.valkey_url,
        "KEY_PREFIX": "millrace:django",
    }
}

# Users

AUTH_USER_MODEL = "tenants.User"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]
LOGIN_URL = "/login"
LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "/login"

# Sign-in with django-allauth: by email address and password, then TOTP; or by OpenID Connect. There is no self-service
# sign-up: users join by invitation (tenants.invitations) or are created by an operator.

AUTHENTICATION_BACKENDS = ["allauth.account.auth_backends.AuthenticationBackend"]
ACCOUNT_ADAPTER = "frontend.accounts.adapters.AccountAdapter"
ACCOUNT_FORMS = {
    "login": "frontend.accounts.adapters.LogInForm",
    "change_password": "frontend.accounts.adapters.ChangePassword",
    "reset_password": "frontend.accounts.adapters.ResetPassword",
}
ACCOUNT_USER_MODEL_USERNAME_FIELD = None
ACCOUNT_LOGIN_METHODS = {"email"}
ACCOUNT_SIGNUP_FIELDS = ["email*", "password1*", "password2*"]
ACCOUNT_EMAIL_VERIFICATION = "none"
ACCOUNT_EMAIL_SUBJECT_PREFIX = ""
ACCOUNT_LOGOUT_REDIRECT_URL = LOGOUT_REDIRECT_URL
ACCOUNT_SESSION_REMEMBER = True
ACCOUNT_REAUTHENTICATION_TIMEOUT = 300
ACCOUNT_DEFAULT_HTTP_PROTOCOL = "https" if _https else "http"
# allauth's limits are off. tenants.login_throttle counts attempts, and does not block known devices because of others.
ACCOUNT_RATE_LIMITS = MFA_RATE_LIMITS = False
ACCOUNT_EMAIL_UNKNOWN_ACCOUNTS = False
MFA_SUPPORTED_TYPES = ["totp", "webauthn", "recovery_codes"]
MFA_PASSKEY_LOGIN_ENABLED = True
MFA_ADAPTER = "frontend.accounts.passkeys.MfaAdapter"
MFA_TOTP_ISSUER = "Millrace"
MFA_TOTP_TOLERANCE = 1  # the codes before and after the current one: clocks differ, and typing takes time
MFA_FORMS = {
    "authenticate": "frontend.accounts.adapters.EnterCode",
    "reauthenticate": "frontend.accounts.adapters.EnterCodeAgain",
    "activate_totp": "frontend.accounts.adapters.AdaptersActivateTotp",
    "authenticate_webauthn": "frontend.accounts.passkeys.EnterPasskey",
    "reauthenticate_webauthn": "frontend.accounts.passkeys.EnterPasskeyAgain",
    "login_webauthn": "frontend.accounts.passkeys.SignInWithPasskey",
    "add_webauthn": "frontend.accounts.passkeys.AddPasskeyForm",
    "edit_webauthn": "frontend.accounts.passkeys.RenamePasskeyForm",
}
SOCIALACCOUNT_ADAPTER = "frontend.accounts.adapters.SocialAccountAdapter"
SOCIALACCOUNT_EMAIL_AUTHENTICATION = True  # the provider's verified addresses are trusted
SOCIALACCOUNT_EMAIL_AUTHENTICATION_AUTO_CONNECT = True
SOCIALACCOUNT_QUERY_EMAIL = True
SOCIALACCOUNT_PROVIDERS = {
    "openid_connect": {
        "provider_class": "frontend.accounts.openid_connect.OidcProvider",
        "OAUTH_PKCE_ENABLED": True,
        "APPS": [
            {
                "provider_id": "sso",
                "name": _settings.oidc_name,
                "client_id": _settings.oidc_client_id,
                "secret": _settings.oidc_client_secret,
                "settings": {"server_url": _settings.oidc_issuer},
            }
        ]
        if _settings.oidc_issuer
        else [],
    }
}
OPERATORS_NEED_TOTP = _settings.operators_need_totp

# Email

if _settings.email_url:
    _mail_server = parse_mail_server(_settings.email_url)
    EMAIL_HOST, EMAIL_PORT = _mail_server.host, _mail_server.port
    EMAIL_HOST_USER, EMAIL_HOST_PASSWORD = _mail_server.user, _mail_server.password
    EMAIL_USE_SSL, EMAIL_USE_TLS = _mail_server.has_implicit_tls, _mail_server.has_starttls
    EMAIL_TIMEOUT = 20
else:
    EMAIL_BACKEND = "django.core.mail.backends.filebased.EmailBackend"
    EMAIL_FILE_PATH = str(_settings.data_dir / "mail")
DEFAULT_FROM_EMAIL = SERVER_EMAIL = _settings.email_from

# Language and time zone

LANGUAGE_CODE = "en"
LANGUAGES = [("en", "English"), ("de", "Deutsch")]
# Numbers in templates are drawn or formatted by filters, so they stay as they are in every language.
FORMAT_MODULE_PATH = ["frontend.formats"]
TIME_ZONE = "UTC"
USE_TZ = True
USE_I18N = True

# Static files are served from the apps' directories. There is no collectstatic step.

STATIC_URL = "static/"
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = DEBUG

# Management API

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["rest_framework.authentication.SessionAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_PAGINATION_CLASS": "tenants.api.pagination.NewestFirst",
    "DEFAULT_SCHEMA_CLASS": "tenants.api.openapi.ManagementSchema",
    "EXCEPTION_HANDLER": "tenants.problems.problem_handler",
    "TEST_REQUEST_DEFAULT_FORMAT": "json",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Millrace management API",
    "DESCRIPTION": "Tenants, keys, limits, budgets, usage and invoices.",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SCHEMA_PATH_PREFIX": "/api",
    "SERVE_INCLUDE_SCHEMA": False,
    "SWAGGER_UI_DIST": "SIDECAR",
    # All tags fit on a screen; of a long list, Swagger UI renders only the operations in view.
    "SWAGGER_UI_SETTINGS": {"deepLinking": True, "docExpansion": "none", "filter": True},
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
    "GET_LIB_DOC_EXCLUDES": "tenants.api.openapi.base_classes",
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "tenants.api.openapi.inline_empty_values",
        "tenants.api.openapi.share_parameters",
    ],
    "ENUM_GENERATE_CHOICE_DESCRIPTION": False,
    "ENUM_NAME_OVERRIDES": {  # every enumeration has a name here
        "AdjustmentReason": "billing.models.budget_leases.Adjustment.Reason",
        "AlertMetric": "millrace.apps.alerts.models.AlertRule.Metric",
        "AlertWindowMinutes": "millrace.apps.alerts.api.WINDOW_CHOICES",
        "AnswerCacheScope": "tenants.tenant_settings.ANSWER_CACHE_SCOPES.items",
        "ApiKeyScope": "tenants.keys.snapshot.SCOPES",
        "BankEntryState": "billing.models.bank.BankEntry.State",
        "BudgetMode": "billing.models.budgets.Budget.Mode",
        "BudgetPeriodType": "billing.models.budgets.Budget.Period",
        "BudgetUnit": "billing.models.budgets.BudgetPeriod.Unit",
        "BuyerType": "billing.models.taxes.TaxRule.Buyer",
        "CacheLayerName": "millrace.apps.request_log.models.CacheLayer",
        "CreditGrantType": "billing.models.ledger.CreditGrant.GrantType",
        "Currency": "billing.currencies.iso_codes.CURRENCY_CODES",
        "DeploymentEngine": "millrace.apps.deployments.value_checks.ENGINES",
        "DeploymentState": "millrace.apps.deployments.api.DEPLOYMENT_STATES",
        "DeploymentTask": "millrace.apps.deployments.api.TASKS",
        "EmailDeliveryState": "tenants.models.webhooks.OutboxEmail.State",
        "ExecutionOutcome": "billing.models.usage.ExecutionOutcome",
        "ExperimentDecision": "millrace.apps.experiments.serializers.DECISIONS",
        "ExperimentMetric": "millrace.apps.experiments.metrics.METRICS",
        "ExperimentMetricResult": "millrace.apps.experiments.serializers.CHANGE_RESULTS",
        "ExperimentState": "tenants.models.experiments.Experiment.State",
        "ExperimentUnit": "tenants.models.experiments.Experiment.Unit",
        "ImportFileType": "billing.api.price_serializers.IMPORT_FILE_TYPES",
        "InvoiceState": "billing.models.invoicing.Invoice.State",
        "InvoiceType": "billing.models.invoicing.Invoice.InvoiceType",
        "LedgerAccount": "billing.models.ledger.Account",
        "ManualCreditGrantType": "billing.api.serializers.MANUAL_GRANT_TYPES",
        "MeteredComponent": "billing.rates.pricing.METERED",
        "NotificationKind": "tenants.api.notifications.KIND_CHOICES",
        "PaymentEventStatus": "billing.models.ledger.PaymentEvent.Status",
        "PaymentFileType": "billing.payments.bank_files.FILE_TYPES",
        "PolicyDiffChange": "tenants.api.policies.DIFF_CHANGES",
        "PolicyDryRunRejectionCode": "millrace.apps.policy_results.api.REJECTION_CODES",
        "OperatorNotificationKind": "tenants.api.notifications.OPERATOR_KIND_CHOICES",
        "PriceComponent": "billing.rates.pricing.PRICED",
        "PriceTermType": "billing.api.price_terms.PRICE_TERM_TYPES",
        "PriceVersionState": "billing.models.prices.PriceVersion.State",
        "RateLimitScope": "tenants.api.serializers.RATE_LIMIT_SCOPES",
        "RequestOutcome": "millrace.apps.request_log.models.RequestOutcome",
        "ReratingState": "billing.models.reratings.Rerating.State",
        "Role": "tenants.models.people.Membership.Role",
        "ServiceTier": "billing.api.price_serializers.SERVICE_TIERS",
        "TargetProblemCode": "tenants.api.target_problems.TARGET_PROBLEM_CODES",
        "StatementLineType": "billing.accounting.statements.LINE_TYPES.items",
        "TaxCategory": "billing.models.taxes.TaxCategory",
        "TenantJobStatus": "tenants.models.jobs.TenantJob.Status",
        "TenantStatus": "tenants.models.tenancy.Tenant.Status",
        "TokenComponent": "billing.rates.pricing.COMPONENTS",
        "UnknownParameterHandling": "tenants.tenant_settings.UNKNOWN_PARAMETERS.items",
        "UsageBucket": "billing.metering.usage.BUCKETS",
        "UsageGroup": "billing.metering.usage.GROUPS",
        "UsageSource": "billing.models.usage.UsageSource",
        "VoucherType": "billing.models.parties.BillingEntity.VoucherType",
        "WantedDeploymentState": "millrace.apps.deployments.api.WANTED_STATES",
        "WarmedCache": "millrace.apps.answer_caches.models.WarmedPrompt.Cache",
        "WebhookDeliveryState": "tenants.models.webhooks.WebhookDelivery.State",
        "WebhookEndpointKind": "tenants.models.webhooks.WebhookEndpoint.Kind",
        "WebhookEventType": "tenants.webhooks.event_types.EVENT_TYPES",
    },
}

# Security

DATA_UPLOAD_MAX_MEMORY_SIZE = _settings.max_request_body_bytes
SECURITY_HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' data:",
            "font-src 'self'",
            "connect-src 'self'",
            "form-action 'self'",
            "base-uri 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cross-Origin-Resource-Policy": "same-origin",
}
X_FRAME_OPTIONS = "DENY"
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SECURE_CROSS_ORIGIN_OPENER_POLICY = "same-origin"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_HTTPONLY = True
CSRF_COOKIE_SAMESITE = "Lax"
if _https:
    CSRF_TRUSTED_ORIGINS = [_settings.public_url]
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    SECURE_SSL_REDIRECT = True
    SECURE_HSTS_SECONDS = 365 * 24 * 3600
    SECURE_HSTS_INCLUDE_SUBDOMAINS = True
    SECURE_HSTS_PRELOAD = True
    SESSION_COOKIE_SECURE = True
    CSRF_COOKIE_SECURE = True

# Logs

LOGGING_CONFIG = "millrace.conf.logs.configure"
LOGGING = {"level": _settings.log_level, "format": _settings.log_format}
