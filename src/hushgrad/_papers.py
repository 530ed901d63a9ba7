"""Bibliography entries. A class lists its papers in ``papers``; those that several classes share are defined here."""

from __future__ import annotations

from typing import NamedTuple


class Paper(NamedTuple):
    """One entry of a bibliography."""

    key: str
    kind: str
    author: str
    title: str
    year: int
    where: str = ""
    arxiv: str = ""

    def bibtex(self) -> str:
        """This paper as a BibTeX entry."""
        venue = {"inproceedings": "booktitle", "article": "journal"}.get(self.kind, "howpublished")
        fields = [("author", self.author), ("title", f"{{{self.title}}}"), ("year", str(self.year))]
        fields += [(venue, self.where)] if self.where else []
        fields += [("eprint", self.arxiv), ("archiveprefix", "arXiv")] if self.arxiv else []
        return f"@{self.kind}{{{self.key},\n" + "".join(f"  {name} = {{{value}}},\n" for name, value in fields) + "}"


ABADI_2016_DEEP = Paper(
    "abadi2016deep",
    "inproceedings",
    "Abadi, Martin and Chu, Andy and Goodfellow, Ian and McMahan, H. Brendan and Mironov, Ilya and Talwar, Kunal and Zhang, Li",
    "Deep Learning with Differential Privacy",
    2016,
    "ACM CCS",
    arxiv="1607.00133",
)
BALLE_2018_IMPROVING = Paper(
    "balle2018improving",
    "inproceedings",
    "Balle, Borja and Wang, Yu-Xiang",
    "Improving the {Gaussian} Mechanism for Differential Privacy: Analytical Calibration and Optimal Denoising",
    2018,
    "ICML",
    arxiv="1805.06530",
)
BASSILY_2014_PRIVATE = Paper(
    "bassily2014private",
    "inproceedings",
    "Bassily, Raef and Smith, Adam and Thakurta, Abhradeep",
    "Private Empirical Risk Minimization: Efficient Algorithms and Tight Error Bounds",
    2014,
    "FOCS",
    arxiv="1405.7085",
)
CANONNE_2020_DISCRETE = Paper(
    "canonne2020discrete",
    "inproceedings",
    "Canonne, Clement L. and Kamath, Gautam and Steinke, Thomas",
    "The Discrete {Gaussian} for Differential Privacy",
    2020,
    "NeurIPS",
    arxiv="2004.00010",
)
CHOQUETTE_2023_AMPLIFIED = Paper(
    "choquette2023amplified",
    "inproceedings",
    "Choquette-Choo, Christopher A. and others",
    "({Amplified}) Banded Matrix Factorization: A Unified Approach to Private Training",
    2023,
    "NeurIPS",
    arxiv="2306.08153",
)
CHOQUETTE_2024_CORRELATED = Paper(
    "choquette2024correlated",
    "inproceedings",
    "Choquette-Choo, Christopher A. and Dvijotham, Krishnamurthy and Pillutla, Krishna and others",
    "Correlated Noise Provably Beats Independent Noise for Differentially Private Learning",
    2024,
    "ICLR",
    arxiv="2310.06771",
)
DENISOV_2022_IMPROVED = Paper(
    "denisov2022improved",
    "inproceedings",
    "Denisov, Sergey and McMahan, H. Brendan and Rush, Keith and Smith, Adam and Thakurta, Abhradeep",
    "Improved Differential Privacy for {SGD} via Optimal Private Linear Operators on Adaptive Streams",
    2022,
    "NeurIPS",
    arxiv="2202.08312",
)
DWORK_2014_FOUNDATIONS = Paper(
    "dwork2014foundations",
    "article",
    "Dwork, Cynthia and Roth, Aaron",
    "The Algorithmic Foundations of Differential Privacy",
    2014,
    "Foundations and Trends in Theoretical Computer Science",
)
KAIROUZ_2015_COMPOSITION = Paper(
    "kairouz2015composition",
    "inproceedings",
    "Kairouz, Peter and Oh, Sewoong and Viswanath, Pramod",
    "The Composition Theorem for Differential Privacy",
    2015,
    "ICML",
    arxiv="1311.0776",
)
KAIROUZ_2021_PRACTICAL = Paper(
    "kairouz2021practical",
    "inproceedings",
    "Kairouz, Peter and McMahan, H. Brendan and Song, Shuang and Thakkar, Om and Thakurta, Abhradeep and Xu, Zheng",
    "Practical and Private (Deep) Learning without Sampling or Shuffling",
    2021,
    "ICML",
    arxiv="2103.00039",
)
ZHANG_2024_DOPPLER = Paper(
    "zhang2024doppler",
    "inproceedings",
    "Zhang, Xinwei and Bu, Zhiqi and Hong, Mingyi and Razaviyayn, Meisam",
    "{DOPPLER}: Differentially Private Optimizers with Low-pass Filter for Privacy Noise Reduction",
    2024,
    "NeurIPS",
    arxiv="2408.13460",
)
