"""What judges an answer. No notebook imports from here.

checking/     verdicts, looks, known mistakes
probes/       what looks at an answer at work
pretend_gpu/  GPUs that are not there, for programs that would run on them
checks/       a package for each practical work, a module for each balise
contest       races of answers that have passed
grading/      answers in files: one trainee's, or a whole class's
"""
