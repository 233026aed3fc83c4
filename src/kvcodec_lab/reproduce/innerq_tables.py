"""Tables of the InnerQ paper whose arithmetic is recomputed, as printed; ``measure.printed_rows`` reads them."""

SCORES = """
GSM8k, Llama 3.2-1B | 6.22 2.81 4.02 5.84 5.53 5.31 4.63
GSM8k, Llama 3.2-3B | 26.46 19.33 23.35 25.47 27.14 23.12 24.03
GSM8k, Llama 3.1-8B | 49.96 42.84 47.84 48.90 48.22 47.31 45.94
GSM8k, Llama 2-7B | 13.04 13.12 11.90 12.59 13.42 11.30 0.46
GSM8k, Mistral 7B v0.3 | 36.92 32.30 33.81 34.72 36.47 33.89 33.89
GSM8k, Average | 26.52 22.08 24.18 25.50 26.16 24.19 21.79
Minerva Math (500), Llama 3.2-1B | 4.40 5.20 3.80 3.60 3.40 3.40 2.80
Minerva Math (500), Llama 3.2-3B | 9.20 6.80 8.60 11.40 10.80 8.40 6.60
Minerva Math (500), Llama 3.1-8B | 21.60 17.20 21.00 21.20 20.80 19.60 19.00
Minerva Math (500), Llama 2-7B | 3.20 3.60 4.00 5.20 3.00 3.40 0.40
Minerva Math (500), Mistral 7B v0.3 | 11.60 10.40 10.40 12.80 12.60 11.40 9.80
Minerva Math (500), Average | 10.00 8.64 9.56 10.84 10.12 9.24 7.72
HumanEval, Llama 3.2-1B | 33.54 21.34 33.54 32.72 34.15 27.44 28.66
HumanEval, Llama 3.2-3B | 52.44 52.44 53.05 56.71 52.44 53.66 53.05
HumanEval, Llama 3.1-8B | 67.07 64.02 64.02 63.42 66.46 64.63 64.63
HumanEval, Mistral 7B v0.3 | 40.85 41.46 36.59 41.46 44.51 40.85 39.02
HumanEval, Average | 48.47 44.81 46.80 48.58 49.39 46.64
MBPP, Llama 3.2-1B | 37.00 26.20 34.00 34.20 37.80 35.00 34.20
MBPP, Llama 3.2-3B | 51.60 49.40 49.40 49.60 50.00 49.40 49.20
MBPP, Llama 3.1-8B | 60.00 57.20 58.40 59.80 59.40 59.80 59.00
MBPP, Mistral 7B v0.3 | 42.60 40.40 39.20 42.60 42.40 39.80 38.80
MBPP, Average | 47.80 43.30 45.25 46.55 47.40 46.00
"""
"""Table 1: {task, model | FP16, KIVI, KIVI_Sink, TurboQuant, Base, Hybrid, Small}; two averages lack Small."""

LONG_SCORES = """
gasper, Llama 3.2-1B | 20.29 18.00 17.23 18.37 20.43 19.84
gasper, Llama 3.2-3B | 40.63 37.09 38.49 40.32 39.59 38.84
gasper, Llama 3.1-8B | 44.58 44.08 43.61 44.59 42.40 42.36
gasper, Llama 2-7B | 20.99 21.11 20.30 21.84 22.18 13.12
gasper, Llama 2-13B | 16.59 15.09 15.48 17.85 16.56 17.50
gov-report, Llama 3.2-1B | 29.27 28.57 28.87 28.89 26.72 26.70
gov-report, Llama 3.2-3B | 33.86 32.11 33.76 33.38 32.73 32.25
gov-report, Llama 3.1-8B | 34.61 34.47 34.33 34.33 33.62 33.80
gov-report, Llama 2-7B | 26.88 26.68 26.64 26.12 25.18 17.15
gov-report, Llama 2-13B | 27.82 27.01 27.10 27.29 26.38 25.69
multinews, Llama 3.2-1B | 26.08 25.89 26.02 26.07 25.06 24.70
multinews, Llama 3.2-3B | 25.93 25.74 26.07 25.70 25.43 25.35
multinews, Llama 3.1-8B | 26.95 26.39 26.76 26.73 26.20 26.09
multinews, Llama 2-7B | 26.17 25.93 25.8 25.80 26.18 11.7
multinews, Llama 2-13B | 26.56 25.78 26.26 26.17 25.97 26.16
trec, Llama 3.2-1B | 2.00 2.75 3.50 4.75 4.50 3.50
trec, Llama 3.2-3B | 10.03 8.53 9.03 10.50 8.10 9.10
trec, Llama 3.1-8B | 39.50 32.50 34.50 37.00 37.50 38.00
trec, Llama 2-7B | 64.00 64.50 64.50 64.50 64.50 62.00
trec, Llama 2-13B | 68.50 68.00 68.00 67.50 67.50 66.50
triviaqa, Llama 3.2-1B | 64.03 63.92 64.75 62.92 59.06 59.20
triviaqa, Llama 3.2-3B | 69.39 67.29 67.53 67.48 65.37 65.41
triviaqa, Llama 3.1-8B | 91.64 90.53 91.33 91.51 91.70 91.70
triviaqa, Llama 2-7B | 83.51 82.77 82.27 83.84 83.32 39.51
triviaqa, Llama 2-13B | 87.85 87.97 87.83 87.47 88.27 84.55
samsum, Llama 3.2-1B | 6.04 6.83 6.11 6.57 6.18 6.25
samsum, Llama 3.2-3B | 6.70 7.16 7.48 7.00 7.06 7.13
samsum, Llama 3.1-8B | 43.57 42.33 43.09 43.38 42.82 43.12
samsum, Llama 2-7B | 41.36 40.37 40.44 40.62 40.16 14.77
samsum, Llama 2-13B | 42.55 42.12 42.57 42.16 41.77 40.54
lcc, Llama 3.2-1B | 19.29 19.17 18.70 18.29 18.15 18.53
lcc, Llama 3.2-3B | 31.65 31.27 31.01 30.20 30.98 31.63
lcc, Llama 3.1-8B | 43.02 42.85 42.66 42.97 42.76 42.84
lcc, Llama 2-7B | 58.29 57.79 58.12 58.41 57.80 40.41
lcc, Llama 2-13B | 48.22 47.31 48.51 48.04 49.50 46.45
repobench-p, Llama 3.2-1B | 16.61 17.33 15.41 14.54 14.43 15.84
repobench-p, Llama 3.2-3B | 29.56 29.36 29.44 29.19 29.02 29.34
repobench-p, Llama 3.1-8B | 38.26 38.21 38.37 38.23 38.08 37.93
repobench-p, Llama 2-7B | 52.05 51.57 52.04 52.03 50.43 28.71
repobench-p, Llama 2-13B | 49.78 48.59 49.03 49.71 49.05 46.14
"""
"""Table 2, LongBench: {task, model | FP16, KIVI, KIVI_Sink, Base, Hybrid, Small}."""

LATENCY = """
key, FP16 | 76 147 291 576 1148 2291 4593
key, KIVI | 39 72 138 270 535 1063 2120
key, TurboQuant | 34 62 118 230 453 901 1796
key, Base | 30 53 99 192 378 749 1492
key, Hybrid | 30 53 99 192 378 749 1492
key, Small | 30 53 99 192 378 749 1492
value, FP16 | 76 148 291 597 1172 2347 4922
value, KIVI | 40 73 139 273 538 1079 2210
value, TurboQuant | 40 78 149 286 563 1126 2250
value, Base | 34 65 120 228 443 883 1784
value, Hybrid | 33 59 110 214 423 842 1688
value, Small | 32 57 109 211 416 826 1644
total, FP16 | 153 295 582 1174 2320 4638 9516
total, KIVI | 79 146 278 543 1074 2142 4331
total, TurboQuant | 75 140 267 516 1017 2027 4046
total, Base | 64 118 220 420 822 1633 3276
total, Hybrid | 63 112 210 406 801 1591 3180
total, Small | 62 110 208 403 795 1575 3136
"""
"""Table 4: microseconds for 512, 1024, ..., 32768 tokens; Jetson Xavier NX, one layer of Llama 3.1-8B."""

QUANTIZE = """
key | 1.0 15.9 17.3 17.3 17.3
value | 21.1 16.1 1.0 1.4 0.9
total | 22.1 31.9 18.3 18.7 18.2
"""
"""Table 5: microseconds of a decode step's encoding; KIVI, TurboQuant, Base, Hybrid, Small."""
