"""The live view of a run: pure rendering of its status (:mod:`screen`, :mod:`plain`),
background reading (:mod:`reading`), and the terminal (:mod:`terminal`). Nothing here changes the run."""
