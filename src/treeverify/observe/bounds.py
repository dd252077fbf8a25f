"""How far a correct bfloat16 attention result may be from the exact one, and two correct ones from each other.

The unit is the bfloat16 ULP of a row's largest value M: 2**(e-7) for M in [2**e, 2**(e+1)), so between M/256 and M/128.
A row is one (node, head) pair of 512 values. Per element, a kernel with bfloat16 inputs and tensor cores adds:

1. sums in fp32: about 1e-6 of the row's norm (``contract.RELATIVE_ERROR``), under 0.001 ULP;
2. the softmax weights, rounded to bfloat16 before P.V: each errs by at most 2**-8 of itself, in its own direction. The
   error of an output is then a sum over the same rows with the same weights as the output itself, so it scales with the
   output whatever the prefix: 0.5e-3 to 1.5e-3 of the row's root mean square s (sharp to flat softmax). The largest
   of 512 normal errors is 3.2 times that: at most 0.0048 s. Where the outputs spread normally M is 3.2 s as well, and a
   ULP at least 0.0125 s: at most 0.4 ULP;
3. the output, rounded to bfloat16: at most 0.5 ULP.

One result is therefore within 0.9 ULP of the exact one: ``RESULT_ULP`` = 1. Two results that are each within 1 ULP
differ by at most 2: ``BOUND_ULP``. Their usual distance is smaller. Before step 3 they differ by a normal error of at
most sqrt(2) * 1.5e-3 s = 0.0021 s; two values that are less than one ULP apart round to values at most one ULP apart,
and to be more than one ULP (0.0125 s) apart takes six standard deviations. So nearly every row is within 1 ULP,
and one beyond 2 is not explained by rounding.

What the argument assumes: value rows that do not cancel. Where large values with opposite signs add up to a small
output (|out| far below the weighted mean of |v|), step 2 is large against M in *any* such kernel, and both may be
beyond the bound and right. ``treeverify replay`` tells: it measures each result against float64.
"""

from __future__ import annotations

RESULT_ULP = 1.0
"""Largest error of one correct result against exact arithmetic, in bfloat16 ULP of the row's largest value."""
BOUND_ULP = 2 * RESULT_ULP
"""Largest difference of two correct results; a validate row beyond it is a breach."""
