"""The local stack: Apache Kafka, an S3 store, the OpenTelemetry Collector and Zipkin as plain processes.

What infra/prepare.py imports needs only the standard library when it loads: the slow artefacts are made beside the
installation of the environment, by the system's own Python.
"""
