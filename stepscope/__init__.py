"""stepscope: why does my decode step take 9 ms?"""

__version__ = "0.1.0"
