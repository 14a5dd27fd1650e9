"""Everything that goes out: numbered event streams, stored outputs, dead letters, usage and status records.

Worker side (on the engine's loop; as little as possible happens there):
    link        `Link`: what the worker talks to. Survives the delivery process and replays to its successor (R8, R9)
    stream      `Stream`: one attempt as the runner sees it, and what must be replayed of it
    handover    the list of frames that goes over the socket every few milliseconds
    child       one life of the delivery process
    inline      the same core in the worker's own loop

Process side (`python -m service.delivery`; never imports the engine):
    process     socket in, signals, end of life
    core        frames in, records out, in the order of effects that R6 asks for
    attempt     what the core knows of one attempt
    gate        lease and barrier (R5), pure
    alarms      when a stream's tokens must go out
    endings     how an attempt ends, step by step (R6)
    replies, lane   one Kafka producer, one queue a partition
    blobs       large outputs
    gather, coalescer, fold, chunks, events, records   pure

Both: wire (framing and codec).
"""
