/* A path of the construction: the walk of ScaleUp._best_step (roller/construct/scale_up.py), step after step.
 *
 * Integers as Python has them as long as bytes moved stay below 2^63, scores in the same order of operations.
 */
#include <stdint.h>

typedef int64_t i64;

enum { AXES = 24 };

typedef struct {
  i64 elements, held;
  double traffic;
} Costs;

/* `space`: axes, spatial axes, inputs, sizes; of every input its element bytes, how many plain axes and which, how many
 * windows, and of each its extent beside the sum, how many terms, and axis and coefficient of each. */
static Costs costs(const i64 *space, const i64 *shape) {
  i64 axes = space[0], spatial = space[1], inputs = space[2], tiles = 1;
  const i64 *sizes = space + 3, *next = sizes + axes;
  Costs found = {1, 0, 0.0};
  for (i64 a = 0; a < spatial; a++) found.elements *= shape[a];
  for (i64 a = 0; a < axes; a++) tiles *= (sizes[a] + shape[a] - 1) / shape[a];
  for (i64 i = 0; i < inputs; i++) {
    i64 bytes = *next++, count = 1;
    for (i64 left = *next++; left > 0; left--) count *= shape[*next++];
    for (i64 left = *next++; left > 0; left--) {
      i64 extent = *next++;
      for (i64 terms = *next++; terms > 0; terms--, next += 2) extent += next[1] * shape[next[0]];
      count *= extent;
    }
    found.elements += count;
    found.held += bytes * count;
  }
  found.traffic = (double)(tiles * found.held);
  return found;
}

/* Walk from `start` until no step is left, or `most` are made; the number of steps.
 *
 * `menu`: of every axis how many sizes, and the sizes, ascending. By the step with the `rank`-th best score in the first
 * `ranked` steps, by the best one later. `in_bytes`: whether `capacity` bounds bytes in shared memory, or elements in
 * registers. Of every step a line of `steps` gets the axis, the elements, the bytes and the shape, a line of `numbers`
 * score and traffic. The line behind the last step has the most rewarding step that was blocked, axis -1 for none. */
i64 grow(const i64 *space, const i64 *start, const i64 *menu, i64 in_bytes, i64 capacity, i64 rank, i64 ranked, i64 most,
         i64 *steps, double *numbers) {
  i64 axes = space[0], shape[AXES], width = axes + 3;
  const i64 *sizes[AXES];
  for (i64 a = 0; a < axes; a++) {
    shape[a] = start[a];
    sizes[a] = menu;
    menu += 1 + menu[0];
  }
  Costs before = costs(space, shape);
  for (i64 step = 0;; step++) {
    double score[AXES], blocked_score = 0.0;
    i64 size[AXES], order[AXES], count = 0, blocked = -1, blocked_size = 0;
    Costs after[AXES];
    for (i64 a = 0; a < axes; a++) {
      i64 entries = sizes[a][0], now = shape[a], entry = 1;
      if (sizes[a][entries] <= now) continue;
      while (sizes[a][entry] <= now) entry++;
      shape[a] = size[a] = sizes[a][entry];
      after[a] = costs(space, shape);
      shape[a] = now;
      i64 held = in_bytes ? before.held : before.elements, grown = in_bytes ? after[a].held : after[a].elements;
      i64 added = grown - held > 1 ? grown - held : 1;
      score[a] = (before.traffic - after[a].traffic) / (double)added;
      if (!(score[a] > 0.0)) continue;
      if (grown > capacity) {
        if (blocked < 0 || score[a] >= blocked_score) blocked = a, blocked_score = score[a], blocked_size = size[a];
        continue;
      }
      /* Best first; of equal ones the innermost axis. */
      i64 place = count++;
      for (; place > 0 && score[order[place - 1]] <= score[a]; place--) order[place] = order[place - 1];
      order[place] = a;
    }
    i64 *line = steps + step * width;
    if (!count || step == most) {
      line[0] = count ? -1 : blocked;
      for (i64 a = 0; a < axes; a++) line[3 + a] = a == blocked ? blocked_size : shape[a];
      numbers[2 * step] = blocked_score;
      return step;
    }
    i64 chosen = step < ranked ? order[rank < count - 1 ? rank : count - 1] : order[0];
    shape[chosen] = size[chosen];
    before = after[chosen];
    line[0] = chosen, line[1] = before.elements, line[2] = before.held;
    for (i64 a = 0; a < axes; a++) line[3 + a] = shape[a];
    numbers[2 * step] = score[chosen];
    numbers[2 * step + 1] = before.traffic;
  }
}
