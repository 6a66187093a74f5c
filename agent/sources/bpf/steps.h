/* Which step runs: read from the engine's ring, or what was last seen there. */
#ifndef DSAGENT_STEPS_H
#define DSAGENT_STEPS_H

#include "maps.h"

/* The step last seen in a thread's process, or in the target where it has no word of its own. */
static __always_inline __u64 last_step(struct ds_thread *t)
{
	struct ds_word *word = bpf_map_lookup_elem(&words, &t->word);

	return word && word->address ? word->step : shared.step;
}

/* Read the step word from the memory at hand, which must be that of the thread: it runs, or is
 * just being switched out. */
static __always_inline __u64 read_step(struct ds_thread *t)
{
	struct ds_word *word = bpf_map_lookup_elem(&words, &t->word);
	__u64 step;

	if (!word || !word->address)
		return shared.step;
	/* A page that is not there cannot be faulted in now: keep the step last seen. */
	if (!bpf_probe_read_user(&step, sizeof(step), (void *)word->address)) {
		word->step = step;
		shared.step = step;
	}
	return word->step;
}

#endif
