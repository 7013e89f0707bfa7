"""A class at a glance: trainees' verdicts in a shared folder, and the page that shows them to their instructor.

drop    the shared folder: who may do what in it
telling puts each verdict there, in a trainee's kernel
reading reads them, and believes nothing but who owns a file
races   places in the races of a class
desk    what they say of a class: who is where, who is stuck, which hints are met
pace    how many minutes they took, beside those that the course states
command `python -m dlojz_tp class`: the page, a table as CSV, and the minutes
"""
