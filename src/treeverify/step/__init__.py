"""One decode step of DDTREE, whoever serves it: SGLang's worker and the embedded engine are its hosts."""
