/* Sums plus Gaussians, rounded to a grid, for one type REAL of the Gaussians and one vector width; see grid.c. */

/* h rint(sum / h + ratio z): the whole number in k, and how far the rounding is from being in doubt. */
#define ROUNDED(at, room)                                                                                                 \
    do {                                                                                                                  \
        double s = sums[at] * f->inverse;                                                                                 \
        s = s > f->limit ? f->limit : s;                                                                                  \
        s = s < -f->limit ? -f->limit : s;                                                                                \
        double v = s + f->ratio * (double)z[at], k = (v + magic) - magic;                                                 \
        result[at] = k * f->h;                                                                                            \
        room = half - __builtin_fabs(v - k);                                                                              \
    } while (0)

/* One whole group of pairs (x, y): result, and where it is certain, which a positive slack says (kept in double precision only:
 * in single precision the whole group is done again). Says whether all are certain. */
TARGET static int NAME(decided)(const REAL *restrict z, const double *restrict sums, const facts *f, const bound *b,
                                double *restrict result, double *restrict slack) {
    const double magic = 0x1.8p52; /* adding and subtracting it rounds to a whole number, below 2^51 */
    int64_t doubts = 0;
    for (int i = 0; i < PAIRS; i++) {
        double spread = __builtin_fabs((double)z[i]) + __builtin_fabs((double)z[PAIRS + i]); /* at least the radius */
        double half = 0.5 - (b->relative * spread + b->absolute), x_room, y_room;
        half = spread > b->far ? -1.0 : half;
        ROUNDED(i, x_room);
        ROUNDED(PAIRS + i, y_room);
        if (sizeof(REAL) == sizeof(double)) slack[i] = x_room, slack[PAIRS + i] = y_room;
        doubts += !(x_room > 0);
        doubts += !(y_room > 0);
    }
    return doubts == 0;
}
#undef ROUNDED
