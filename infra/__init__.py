"""The local stack: Apache Kafka, an S3 store, the OpenTelemetry Collector and Zipkin as plain processes, without containers.

Modules here import only the standard library when they load (what needs more imports it where it is used): preparing
the slow artefacts starts beside the installation of the environment, with the system's own Python.
"""
