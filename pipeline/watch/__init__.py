"""The live view of a run: one look at its state (:mod:`look`), pure rendering (:mod:`screen`, :mod:`plain`),
background reading (:mod:`reading`), and the terminal (:mod:`terminal`). Nothing here changes the run."""
