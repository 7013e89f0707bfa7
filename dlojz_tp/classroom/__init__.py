"""A class at a glance: trainees' verdicts in a shared folder, and the page that an instructor has before them.

drop    the shared folder: who may do what in it
telling puts each verdict there, in a trainee's kernel
reading reads them, and believes nothing but who owns a file
desk    what they say of a class: who is where, who is stuck, which hints are met
command `python -m dlojz_tp class`: the page, and a table as CSV
"""
