"""How fast LazyRAG is, against the same vLLM without it: `lazyrag bench`.

workload    what is asked: documents, literals, questions, order, arrivals; as data
metrics     what is measured on which workloads, between which arms; as data
arms        the systems compared: how each gets a request served
shapes      the model's shape
engines     one process for each engine, started together, measured one at a time
child       what runs in such a process
gate        the answers come first: no figure is printed if they are wrong
measure     arms take turns, round by round
segment     how fast chunks are found in prompts, beside Aho-Corasick and str.find; needs no engine
ingest      whether embedding and prefill overlap in an ingest, and what memory it takes
texts       what it searches: chunks and prompts like a company's
matcher     the slow and simple way to find chunks, its oracle
hits        the KV hit ratio, simulated from a trace; needs no engine
profile     where the milliseconds of one hot request go
report      rows with machine, versions and commit, as JSON and as tables
run         all of it, within a time limit
"""
