"""Between the natural logarithm and the one of base 2."""

RCP_LN2 = 1.4426950216  # 1 / ln 2, as fp32 rounds it
LN2 = 0.6931471805599453
