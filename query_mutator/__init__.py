"""Query Mutator: learn which rewrite makes an ordinary question get a better answer.

Importing the package is cheap: nothing here loads torch, gymnasium or an encoder.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
