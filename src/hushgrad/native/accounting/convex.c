/* The law of wa A + wb B for two independent variables on sorted places, put onto a third set of sorted places.
 *
 * Only sums of products of non-negative numbers, in one order. Sums of one row are collected before they are added to the result, so a
 * result is a sum of at most `longest` + 2 na terms, which is what the callers' bounds on rounding count.
 */
#include "abi.h"

#include <math.h>

long hushgrad_sum_above(const double *a, const double *p, long na, const double *b, const double *q, long nb, double wa, double wb,
                        double raise, const double *grid, long n, double *out, double *outside) {
    long start = 0, longest = 0;
    for (long i = 0; i < na; i++) {
        double x = wa * a[i], high = 0, low = 0, left = 0, width = 1;
        long k = -2, run = 0; /* of the cell that is being filled; -1: below the first place, n - 1: above the last */
        for (long j = 0; j < nb; j++) {
            double y = wb * b[j], t = x + y + raise * (fabs(x) + fabs(y)), m = p[i] * q[j];
            if (k == -2 || (k < n - 1 && t >= grid[k + 1])) {
                if (k >= 0 && k < n - 1) out[k] += low, out[k + 1] += high;
                else if (k == -1) outside[0] += low, outside[1] += high;
                if (run > longest) longest = run;
                if (k == -2) {
                    k = start - 1;
                    while (k < n - 1 && t >= grid[k + 1]) k++;
                    start = k < 0 ? 0 : k; /* the first sum of the next row is not smaller */
                } else {
                    while (k < n - 1 && t >= grid[k + 1]) k++;
                }
                low = high = 0, run = 0;
                if (k >= 0 && k < n - 1) left = grid[k], width = (grid[k + 1] - left) * (1 - raise);
            }
            run++;
            if (k >= 0 && k < n - 1) {
                double share = (t - left) / width;
                share = share > 1 ? 1 : share < 0 ? 0 : share; /* rounding only */
                high += m * share, low += m * (1 - share);
            } else {
                low += m, high += m * t;
            }
        }
        if (k >= 0 && k < n - 1) out[k] += low, out[k + 1] += high;
        else if (k == -1) outside[0] += low, outside[1] += high;
        else if (k == n - 1) outside[2] += low, outside[3] += high;
        if (run > longest) longest = run;
    }
    return longest;
}

long hushgrad_sum_below(const double *a, const double *p, long na, const double *b, const double *q, long nb, double wa, double wb,
                        const double *edges, long n, double *mass, double *moment) {
    long start = 0, longest = 0;
    for (long i = 0; i < na; i++) {
        double x = wa * a[i], m = 0, s = 0;
        long k = start, run = 0;
        for (long j = 0; j < nb; j++) {
            double t = x + wb * b[j], w = p[i] * q[j];
            if (k < n - 2 && t >= edges[k + 1]) {
                mass[k] += m, moment[k] += s;
                if (run > longest) longest = run;
                while (k < n - 2 && t >= edges[k + 1]) k++;
                m = s = 0, run = 0;
            }
            if (j == 0) start = k;
            run++;
            m += w, s += w * t;
        }
        mass[k] += m, moment[k] += s;
        if (run > longest) longest = run;
    }
    return longest;
}
