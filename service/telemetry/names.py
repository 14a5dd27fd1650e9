"""Every name of the worker's spans, attributes and metrics. No other file spells one.

`messaging.*` follows the OpenTelemetry messaging conventions (semantic-conventions 1.44, Development). The `gen_ai.*`
names are constants of our own: the conventions moved to a repository of their own and the packaged ones are marked
deprecated. What no convention covers is `headrace.*`.
"""

from __future__ import annotations

SCOPE = "headrace"

# Span names: the operation, then what it is done to.
PROCESS = "process"  # + record's topic
QUEUE = "queue"
ADMISSION = "admission"
PREFILL = "prefill"
DECODE = "decode"
SEND = "send"  # + reply topic
STORE = "store"  # + bucket
CHAT = "chat"  # + model
TEXT_COMPLETION = "text_completion"  # + model
EMBEDDINGS = "embeddings"  # + model

FIRST_TOKEN = "first_token"  # event of the inference span
LAST_RECORD = "last_record"  # event of the send span: all is handed over, the acknowledgement is awaited

# Resource
SERVICE_NAME = "service.name"
SERVICE_NAMESPACE = "service.namespace"
SERVICE_VERSION = "service.version"
SERVICE_INSTANCE = "service.instance.id"
POOL = "headrace.pool"

# Messaging
MESSAGING_SYSTEM = "messaging.system"
MESSAGING_OPERATION_NAME = "messaging.operation.name"
MESSAGING_OPERATION_TYPE = "messaging.operation.type"
MESSAGING_DESTINATION = "messaging.destination.name"
MESSAGING_PARTITION = "messaging.destination.partition.id"  # a string, by the convention
MESSAGING_OFFSET = "messaging.kafka.offset"
MESSAGING_KEY = "messaging.kafka.message.key"
MESSAGING_GROUP = "messaging.consumer.group.name"
MESSAGING_CLIENT = "messaging.client.id"
MESSAGING_MESSAGE = "messaging.message.id"
MESSAGING_CONVERSATION = "messaging.message.conversation_id"
MESSAGING_BATCH_COUNT = "messaging.batch.message_count"

# Generation
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_STREAM = "gen_ai.request.stream"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
GEN_AI_TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
GEN_AI_TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"

# Object store
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
S3_BUCKET = "aws.s3.bucket"
S3_KEY = "aws.s3.key"
STORE_BYTES = "headrace.store.bytes"
STORE_TRIES = "headrace.store.tries"

ERROR_TYPE = "error.type"

# Ours
TENANT = "headrace.tenant.id"
TIER = "headrace.tenant.tier"
JOB = "headrace.job.id"
RUN = "headrace.job.run"
ATTEMPT = "headrace.attempt.id"
ATTEMPT_NUMBER = "headrace.attempt.number"
OUTCOME = "headrace.outcome"
ORIGIN = "headrace.origin"
REPLY_BYTES = "headrace.reply.bytes"
REPLY_CHUNKS = "headrace.reply.chunks"
KEPT = "headrace.sampling.reason"
LINK = "headrace.link"  # on links: "publisher" or "earlier_attempt"
BAGGAGE_PREFIX = "baggage."  # + key, for keys on the settings' allow list

# Prometheus: all names begin with this, and end with their unit.
METRIC_PREFIX = "headrace"
