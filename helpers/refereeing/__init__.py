"""Two versions of a training script: whether the edited one is still the same training, and how much faster it is.

cases       a case's folder, a submission's files, and both prepared to run
audit       one whole run, observed: steps, losses, rows, parameters, files, what it leaves behind
judging     a submission's case judged: audits and a paired trial, and what breaks the rules
score       scores, their mean with an interval, the table and the page
"""
