"""The fault kit: real worker processes under load, things broken at random moments, and a judge who reads the log.

jobs        what is published in a round, pure
witness     publishes, reads every event back, and tells what a reader would have seen
breaks      the faults
judgement   a round's numbers from the witness's notes and the faults' times, pure
rounds      one round, and many
"""
