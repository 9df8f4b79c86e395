"""A training loop, recorded or observed, to its account, findings, diagnosis and page.

trace           events, and what ran inside what; trace_file reads them
account         where a step's time goes, in spans
scene, loop     what rules look at: a trace with its account; the observed loop
rules           a function a finding
caveats         why a profile may mislead, and notes
diagnose        all of it put together
summary         what comes out: the findings, as text, data or a table; page draws the last step, too
"""
