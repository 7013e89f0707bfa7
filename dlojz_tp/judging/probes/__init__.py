"""What checks look with: they watch an answer at work and return plain numbers; they know nothing of any work.

ranks: worlds of processes, and what went wrong on them. traffic: collectives and messages, with withheld (what nobody
waited for) and late_rank (who waits). memory: what is held, with settling and threads (what a library lets go of late).
operations: operators, synchronisations, copies. files: what is opened and moved, with crash_images (what a crash would
leave). gpus: a GPU that is not there. shared_looks: looks at all ranks and at GPUs. networks: small models and their
truth. schedules: who knows a pipeline schedule already.
"""
